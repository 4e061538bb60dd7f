"""Hardware and prices: one table per backend, with overrides from a file."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from executors.catalogue import Catalogue
from executors.registry import BACKENDS, TABLES


def test_every_backend_has_a_table_and_a_dated_source_for_its_prices() -> None:
    assert [table.backend for table in TABLES] == list(BACKENDS)
    for table in TABLES:
        assert table.hardware, table.backend
        assert all(h.backend == table.backend for h in table.hardware)
        names = [h.name for h in table.hardware]
        assert len(names) == len(set(names)), table.backend
        if any(h.price_usd_h for h in table.hardware):
            assert datetime.date.fromisoformat(table.read_on), table.backend
            assert table.source, table.backend


def test_hardware_with_gpus_names_them() -> None:
    for table in TABLES:
        for hardware in table.hardware:
            assert bool(hardware.gpu) == (hardware.gpus > 0), hardware
            assert hardware.price_usd_h is None or hardware.price_usd_h >= 0


def catalogue(tmp_path: Path, text: str) -> Catalogue:
    path = tmp_path / "hardware.toml"
    path.write_text(text)
    return Catalogue(TABLES, path)


def test_a_file_corrects_a_price_and_adds_hardware(tmp_path: Path) -> None:
    made = catalogue(
        tmp_path,
        "[modal.H100]\nprice_usd_h = 3\n"
        '[kubernetes."our node"]\ngpu = "nvidia.com/gpu"\ngpus = 8\n',
    )
    known, corrected = Catalogue(TABLES).get("modal", "H100"), made.get("modal", "H100")
    assert known is not None
    assert corrected is not None
    assert (corrected.price_usd_h, corrected.gpus) == (3, known.gpus)
    added = made.get("kubernetes", "our node")
    assert added is not None
    assert (added.label, added.gpus, added.price_usd_h) == ("our node", 8, None)
    assert added in made.of("kubernetes")
    assert made.get("modal", "nonsense") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[moon.X]\n", "expected a backend of local, modal"),
        ("[modal.H100]\nprice = 3\n", "found 'price'"),
        ("[modal.H100]\nprice_usd_h = -1\n", "a number of 0 to 1,000,000, found -1"),
        ('[modal.H100]\nprice_usd_h = "3"\n', "found '3'"),
        ("[modal.H100]\nprice_usd_h = 1e308\n", "found 1e[+]308"),
        ("[modal.H100]\nspot_price_usd_h = nan\n", "found nan"),
        ("[modal.H100]\ngpus = 1.5\n", "expected a whole number of 0 to 1,000,000,000"),
        ("[modal.H100]\nlabel = 1\n", "expected text, found 1"),
        ("[modal]\nH100 = 3\n", "expected a table of fields, found 3"),
        ("[modal", "expected a TOML file"),
    ],
)
def test_an_invalid_file_is_refused_with_the_position(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        catalogue(tmp_path, text)
    assert "hardware.toml" in str(caught.value)


def test_spot_has_a_separate_price(tmp_path: Path) -> None:
    made = catalogue(tmp_path, "[modal.H100]\nprice_usd_h = 3\nspot_price_usd_h = 1\n")
    hardware = made.get("modal", "H100")
    assert hardware is not None
    assert (hardware.price(spot=False), hardware.price(spot=True)) == (3, 1)
