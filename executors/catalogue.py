"""The hardware of each backend, and its price per hour.

Prices are list prices in US dollars for estimates; each table names its source and date. An unknown
value is None, never 0. A TOML file replaces or adds entries (see ``docs/backends.md``)::

    [modal.H100]
    price_usd_h = 3.49
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One machine that a pool can choose. ``name`` is the backend's (flavour, instance type).

    ``gpu`` is the backend's name of the accelerator, empty for none; ``gpus`` is the number per
    replica. Sizes and prices (USD per hour) are those of all GPUs together.
    """

    backend: str
    name: str
    label: str
    gpu: str = ""
    gpus: int = 0
    gpu_memory_gib: float | None = None
    cpus: float | None = None
    memory_gib: float | None = None
    price_usd_h: float | None = None
    spot_price_usd_h: float | None = None

    def price(self, *, spot: bool) -> float | None:
        """USD per hour; None if unknown."""
        return self.spot_price_usd_h if spot else self.price_usd_h


@dataclass(frozen=True, kw_only=True)
class Table:
    """The hardware of one backend. ``read_on`` (ISO date) and ``source`` document its prices."""

    backend: str
    hardware: tuple[Hardware, ...]
    read_on: str = ""
    source: str = ""


class Catalogue:
    """The hardware of all backends, with the overrides of a TOML file.

    Raises :class:`ValueError` for an invalid file.
    """

    def __init__(self, tables: tuple[Table, ...], overrides: Path | None = None) -> None:
        self.tables = {table.backend: table for table in tables}
        self._hardware = {(h.backend, h.name): h for table in tables for h in table.hardware}
        if overrides is not None:
            self._override(overrides)

    def of(self, backend: str) -> tuple[Hardware, ...]:
        return tuple(h for (owner, _), h in self._hardware.items() if owner == backend)

    def get(self, backend: str, name: str) -> Hardware | None:
        return self._hardware.get((backend, name))

    def with_prices(
        self, prices: Mapping[tuple[str, str], tuple[float | None, float | None]]
    ) -> Catalogue:
        """A copy with other prices, on demand and spot, of hardware that it has. None keeps one."""
        result = Catalogue(tuple(self.tables.values()))
        result._hardware = dict(self._hardware)
        for key, (price, spot) in prices.items():
            known = result._hardware.get(key)
            if known is not None:
                result._hardware[key] = replace(
                    known,
                    price_usd_h=known.price_usd_h if price is None else price,
                    spot_price_usd_h=known.spot_price_usd_h if spot is None else spot,
                )
        return result

    def _override(self, path: Path) -> None:
        try:
            given = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{path}: expected a TOML file of hardware, found: {error}") from error
        for backend, entries in given.items():
            if backend not in self.tables:
                raise ValueError(
                    f"{path}: expected a backend of {', '.join(self.tables)}, found {backend!r}"
                )
            for name, fields in entries.items() if isinstance(entries, Mapping) else ():
                self._hardware[backend, name] = _merged(
                    self.get(backend, name), backend, name, fields, path
                )


MAX_PRICE_USD_H = 1e6
_LIMIT = 1e9
"""Of any number of an entry."""
_NUMBERS = ("gpu_memory_gib", "cpus", "memory_gib", "price_usd_h", "spot_price_usd_h")


def _merged(
    known: Hardware | None, backend: str, name: str, fields: object, path: Path
) -> Hardware:
    where = f"{path}: {backend}.{name}"
    if not isinstance(fields, Mapping):
        raise ValueError(f"{where}: expected a table of fields, found {fields!r}")
    for field, value in fields.items():
        limit = MAX_PRICE_USD_H if field.endswith("usd_h") else _LIMIT
        if field in ("label", "gpu"):
            expected, fits = "text", isinstance(value, str)
        elif field == "gpus":
            expected = f"a whole number of 0 to {limit:,.0f}"
            fits = isinstance(value, int) and 0 <= value <= limit
        elif field in _NUMBERS:
            expected = f"a number of 0 to {limit:,.0f}"
            fits = isinstance(value, int | float) and 0 <= value <= limit
        else:
            raise ValueError(
                f"{where}: expected fields of label, gpu, gpus, {', '.join(_NUMBERS)}, "
                f"found {field!r}"
            )
        if not fits:
            raise ValueError(f"{where}.{field}: expected {expected}, found {value!r}")
    base = known or Hardware(backend=backend, name=name, label=name)
    return replace(base, **fields)
