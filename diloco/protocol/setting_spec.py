"""Describes one setting (label, help, unit, bounds) and validates its value.

:class:`diloco.protocol.settings.GroupSettings` checks rules between settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from diloco.protocol.parsing import abridged

_HUGE = 2**63


class SettingsError(ValueError):
    """A setting is missing, unknown or out of range. ``field`` is its name, or ''."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(f"{field_name}: {message}" if field_name else message)
        self.field = field_name
        self.message = message


@dataclass(frozen=True, kw_only=True)
class SettingSpec:
    """Label, help text and bounds of one setting."""

    name: str
    label: str
    help: str
    section: str
    kind: Literal["int", "float", "choice"]
    default: Any
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    zero: str = ""
    """The meaning of 0 in a word ("never"), if it has a special meaning."""

    def check(self, value: Any) -> Any:
        """Return the value in the setting's type. Raises :class:`SettingsError`."""
        if self.kind == "choice":
            if value not in self.choices:
                raise SettingsError(
                    self.name, f"expected one of {', '.join(self.choices)}, found {abridged(value)}"
                )
            return value
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and not (
            math.isfinite(value) if isinstance(value, float) else abs(value) < _HUGE
        ):
            raise SettingsError(self.name, f"expected a finite number, found {abridged(value)}")
        if self.kind == "int":
            if not number or value != int(value):
                raise SettingsError(self.name, f"expected a whole number, found {abridged(value)}")
            value = int(value)
        else:
            if not number or not math.isfinite(value):
                raise SettingsError(self.name, f"expected a finite number, found {abridged(value)}")
            value = float(value)
        if self.minimum is not None and value < self.minimum:
            raise SettingsError(
                self.name, f"expected {plain(self.minimum)} or more, found {plain(value)}"
            )
        if self.maximum is not None and value > self.maximum:
            raise SettingsError(
                self.name, f"expected {plain(self.maximum)} or less, found {plain(value)}"
            )
        return value


def plain(value: float) -> str:
    """Format a number with thousands separators."""
    return f"{value:,.10g}"


def int_setting(default: int, label: str, help: str, section: str, **bounds: Any) -> Any:
    """Return a dataclass field; ``bounds`` are ``minimum``, ``maximum``, ``unit`` and ``zero``."""
    return _setting("int", default, label, help, section, **bounds)


def float_setting(default: float, label: str, help: str, section: str, **bounds: Any) -> Any:
    """Return a dataclass field; see :func:`int_setting`."""
    return _setting("float", default, label, help, section, **bounds)


def choice_setting(
    default: str, label: str, help: str, section: str, *, choices: tuple[str, ...]
) -> Any:
    """Return a dataclass field with one of ``choices``."""
    return _setting("choice", default, label, help, section, choices=choices)


def _setting(kind: str, default: Any, label: str, help: str, section: str, **details: Any) -> Any:
    metadata = {"kind": kind, "label": label, "help": help, "section": section, **details}
    return field(default=default, metadata=metadata)
