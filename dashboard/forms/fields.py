"""Form fields: durations, group settings built from their schema, and selects whose options carry
data attributes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from django import forms
from django.forms.utils import flatatt
from django.utils.html import format_html
from django.utils.safestring import SafeString

from diloco.protocol.settings import SettingsError, SettingSpec

_UNITS = {"d": 86_400, "h": 3600, "m": 60, "min": 60, "s": 1}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(d|h|min|m|s)(?![a-z])", re.IGNORECASE)
LONGEST_S = 366 * 86_400


def parse_seconds(text: str) -> int:
    """Seconds of ``2h 30m``, ``90 min``, ``1.5h`` or ``1d``. Raises :class:`ValueError`.

    A number without a unit is rejected: 90 could be minutes or seconds.
    """
    at, seconds = 0, 0.0
    text = text.strip()
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            raise ValueError(f"Enter a duration such as 90m or 2h 30m, not {text!r}")
        seconds += float(part[1]) * _UNITS[part[2].lower()]
        at = part.end()
    if seconds > LONGEST_S:
        raise ValueError(f"Enter at most one year (366d), not {text!r}")
    return round(seconds)


def write_seconds(seconds: int) -> str:
    """Inverse of :func:`parse_seconds`: ``2h 30m``; empty for 0, which means no limit."""
    parts = []
    for unit in ("d", "h", "m", "s"):
        count, seconds = divmod(seconds, _UNITS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts)


class DurationField(forms.CharField):
    """Seconds, entered as ``2h 30m``. An empty field is 0."""

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
        """Skip the validators of text; :func:`parse_seconds` checks the bounds."""


class DataSelect(forms.Select):
    """A select whose options carry ``data-`` attributes, which the page's script filters by.

    Its options are formatted here: Django renders a template for each, and a page has hundreds.
    """

    def __init__(self, data: Mapping[str, Mapping[str, Any]], **options: Any) -> None:
        super().__init__(**options)
        self.data = data

    def render(self, name: str, value: Any, attrs: Any = None, renderer: Any = None) -> SafeString:
        selected = set(self.format_value(value))
        attributes = flatatt(self.build_attrs(self.attrs, attrs))
        options = SafeString("".join(self._options(self.choices, selected)))
        return format_html('<select name="{}"{}>{}</select>', name, attributes, options)

    def _options(self, choices: Any, selected: set[str]) -> Iterator[str]:
        for value, label in choices:
            if isinstance(label, list | tuple):
                options = SafeString("".join(self._options(label, selected)))
                yield format_html('<optgroup label="{}">{}</optgroup>', value, options)
            else:
                marks = flatatt(self._data(value) | {"selected": str(value) in selected})
                yield format_html('<option value="{}"{}>{}</option>', value, marks, label)

    def _data(self, value: Any) -> dict[str, str | bool]:
        return {
            f"data-{key}": "1" if item is True else str(item)
            for key, item in self.data.get(str(value), {}).items()
            if item not in (None, "", False)
        }


def setting_field(spec: SettingSpec) -> forms.Field:
    """A form field for one group setting. The schema checks the bounds and words the error."""
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
    [
        "data",
        "rendezvous",
        "image",
        "region",
        "function",
        "arguments",
        "model",
        "revision",
        "config",
        "tokenizer",
        "data_config",
        "data_split",
        "text_column",
    ]
)
"""Fields without spell checking."""


TOO_LONG = "Enter at most %(limit_value)d characters, not %(show_value)d."


def style_inputs(form: forms.BaseForm) -> None:
    """Set the CSS class of the inputs, and turn off autocompletion from earlier forms.

    Inputs have no ``maxlength``: browsers cut pasted text without notice. The form refuses it.
    """
    for name, field in form.fields.items():
        if isinstance(field.widget, forms.RadioSelect | forms.HiddenInput | forms.CheckboxInput):
            continue
        field.widget.attrs.pop("maxlength", None)
        field.error_messages["max_length"] = TOO_LONG
        field.widget.attrs.update({"class": "input", "autocomplete": "off"})
        if isinstance(field.widget, forms.Textarea):
            field.widget.attrs["class"] = "input lines"
        if name in _NAMES:
            field.widget.attrs["spellcheck"] = "false"


class StyledForm(forms.Form):
    """A form whose inputs have the classes of the pages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        style_inputs(self)
