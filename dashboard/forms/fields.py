"""Fields of our own: a time as people write it, a group setting from its schema, and a select
whose options tell the browser more than their label."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from django import forms

from diloco.protocol.settings import SettingsError, SettingSpec

_UNITS = {"d": 86_400, "h": 3600, "m": 60, "min": 60, "s": 1}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(d|h|min|m|s)(?![a-z])", re.IGNORECASE)
LONGEST_S = 366 * 86_400


def parse_seconds(text: str) -> int:
    """``2h 30m``, ``90 min``, ``1.5h`` or ``1d`` in seconds. Raises :class:`ValueError`.

    A number needs its unit: 90 may be meant as minutes or as seconds.
    """
    at, seconds = 0, 0.0
    text = text.strip()
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            raise ValueError(f"expected a time such as 90m or 2h 30m, found {text!r}")
        seconds += float(part[1]) * _UNITS[part[2].lower()]
        at = part.end()
    if seconds > LONGEST_S:
        raise ValueError(f"expected at most a year, found {text!r}")
    return round(seconds)


def write_seconds(seconds: int) -> str:
    """As :func:`parse_seconds` reads it: ``2h 30m``; '' for 0, which is no limit."""
    parts = []
    for unit in ("d", "h", "m", "s"):
        count, seconds = divmod(seconds, _UNITS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts)


class DurationField(forms.CharField):
    """Seconds, written as ``2h 30m``. Left empty it is 0."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"required": False, "max_length": 40} | options)

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value)
        try:
            return parse_seconds(text or "")
        except ValueError as error:
            raise forms.ValidationError(str(error)) from None

    def prepare_value(self, value: Any) -> Any:
        return write_seconds(value) if isinstance(value, int) else value

    def run_validators(self, value: Any) -> None:
        """Those of a text do not fit a number; the bounds are in :func:`parse_seconds`."""


class TellingSelect(forms.Select):
    """A select whose options carry ``data-`` attributes, for the browser to choose by."""

    def __init__(self, data: Mapping[str, Mapping[str, Any]], **options: Any) -> None:
        super().__init__(**options)
        self.data = data

    def create_option(self, name: str, value: Any, *args: Any, **options: Any) -> Any:
        made = super().create_option(name, value, *args, **options)
        for key, told in self.data.get(str(value), {}).items():
            if told not in (None, "", False):
                made["attrs"][f"data-{key}"] = "1" if told is True else str(told)
        return made


def setting_field(spec: SettingSpec) -> forms.Field:
    """A form field for one group setting. Bounds are left to the schema, which words the error."""
    if spec.kind == "choice":
        return forms.ChoiceField(
            label=spec.label, help_text=spec.help, choices=[(c, c) for c in spec.choices]
        )
    kind = forms.IntegerField if spec.kind == "int" else forms.FloatField
    return kind(label=spec.label, help_text=spec.help, validators=[bounds(spec)])


def bounds(spec: SettingSpec) -> Any:
    def check(value: Any) -> None:
        try:
            spec.check(value)
        except SettingsError as error:
            raise forms.ValidationError(error.message) from None

    return check


_NAMES = frozenset(
    {"data", "rendezvous", "image", "region", "function", "arguments", "model", "revision",
     "config", "tokenizer", "data_config", "data_split", "text_column"}
)  # fmt: skip
"""Fields whose words no spell checker knows."""


def dress(form: forms.Form) -> None:
    """The look all inputs share, and no help from browsers that remember other people's runs."""
    for name, field in form.fields.items():
        if isinstance(field.widget, forms.RadioSelect | forms.HiddenInput | forms.CheckboxInput):
            continue
        field.widget.attrs.update({"class": "input", "autocomplete": "off"})
        if isinstance(field.widget, forms.Textarea):
            field.widget.attrs["class"] = "input lines"
        if name in _NAMES:
            field.widget.attrs["spellcheck"] = "false"
