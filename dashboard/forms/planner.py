"""The planner's form. The URL holds all inputs.

Numbers can have suffixes (``1B``, ``500k``). Group settings have the same fields as in the submit
form. The bounds are declared here; the API uses them through :func:`bounds_of`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django import forms

from dashboard.forms.fields import setting_field, style_inputs
from diloco.protocol.settings import setting_fields
from diloco.protocol.workload import GPT_SIZES
from executors.registry import BACKENDS
from runs.backends.executors import catalogue
from runs.submit.planner import PlannerInputs

_NUMBER = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([kMGBT]?)\s*", re.IGNORECASE)
_TIMES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}

EXAMPLE = PlannerInputs(
    parameters=1_000_000_000,
    num_replicas=8,
    sync_every=100,
    codec="bf16",
    step_s=1.0,
    tokens_per_step=65_536,
    tokens=20_000_000_000,
    mtbf_h=24.0,
    usd_h=2.0,
)
"""The planner's default inputs."""

GROUP_SETTINGS = (
    "num_replicas",
    "sync_every",
    "codec",
    "mean_codec",
    "num_fragments",
    "overlap_steps",
    "reduce_plan",
    "min_quorum",
)

SHORT_HELP = {
    "num_replicas": "",
    "sync_every": "Between exchanges.",
    "codec": "Compression of exchanges.",
    "mean_codec": "Compression of the mean.",
    "num_fragments": "Exchanged in turn.",
    "overlap_steps": "Compute during an exchange.",
    "reduce_plan": "auto picks the fastest.",
    "min_quorum": "With fewer replicas the run waits.",
}
"""Shorter help than in the submit form: the planner's charts show the effect of a setting."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Inclusive bounds of a number, or the ``choices`` of a text."""

    least: float = 0
    most: float = 1e18
    whole: bool = False
    choices: tuple[str, ...] = ()


class NumberField(forms.CharField):
    """A number such as ``1B``, ``150M``, ``500k``, ``1e9``, ``2.5``; an int if ``whole``."""

    def __init__(
        self, *, least: float = 0, most: float = 1e18, whole: bool = False, **options: Any
    ) -> None:
        super().__init__(max_length=40, **options)
        self.bounds = Bounds(least=least, most=most, whole=whole)

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value)
        if not text:
            return None
        match = _NUMBER.fullmatch(text)
        try:
            number = float(match[1].replace(",", "")) * _TIMES[match[2].lower()] if match else None
        except ValueError:
            number = None
        if number is None:
            raise forms.ValidationError(f"Enter a number such as 2.5, 500k or 1B, not {text!r}")
        bounds = self.bounds
        if not bounds.least <= number <= bounds.most:
            raise forms.ValidationError(
                f"Enter a number from {bounds.least:g} to {bounds.most:g}, not {text!r}"
            )
        if bounds.whole and number != int(number):
            raise forms.ValidationError(f"Enter a whole number, not {text!r}")
        return int(number) if bounds.whole else number

    def prepare_value(self, value: Any) -> Any:
        return write_number(value) if isinstance(value, int | float) else value

    def run_validators(self, value: Any) -> None:
        """Skip the validators of text; ``to_python`` checks the bounds."""


def write_number(value: float) -> str:
    """Inverse of :class:`NumberField`, without losing a digit: ``20B``, ``65536``, ``0.1``."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size and float(f"{value / size:.4g}") * size == value:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.15g}"


class PlannerForm(forms.Form):
    """Field names are :class:`~runs.submit.planner.PlannerInputs`'s, and ``hardware``.

    The lower bounds of times and bandwidths keep the arithmetic within the range of a float.
    """

    parameters = NumberField(
        label="Parameters", least=1, most=1e14, whole=True, help_text="E.g. 150M or 1B."
    )
    tokens = NumberField(
        label="Tokens to train", least=1, most=9e15, whole=True, help_text="All replicas."
    )
    hardware = forms.ChoiceField(
        label="Hardware", required=False, help_text="Sets the price. Measure the step time."
    )
    step_s = NumberField(
        label="Inner step", least=1e-6, most=86_400, help_text="Measured on one replica."
    )
    tokens_per_step = NumberField(
        label="Tokens per step", least=1, most=1e10, whole=True, help_text="One replica."
    )
    mbit_s = NumberField(
        label="Bandwidth",
        least=1e-3,
        most=1e7,
        help_text="Replica to bucket, each way.",
    )
    latency_s = NumberField(
        label="Store latency", most=60, help_text="Time to the first byte of a request."
    )
    mtbf_h = NumberField(
        label="Time between failures",
        least=1e-3,
        most=1e6,
        required=False,
        help_text="Mean of one replica. Leave empty for never.",
    )
    replace_s = NumberField(
        label="Replacement time", most=1e6, help_text="From a failure to the new replica's start."
    )
    usd_h = NumberField(
        label="Price",
        most=1e5,
        required=False,
        help_text="Per replica. Leave empty for the list price.",
    )
    egress_usd_gb = NumberField(
        label="Egress", most=100, help_text="Per GB read. 0 in the bucket's own region."
    )

    def __init__(self, data: Any = None) -> None:
        # Inputs that the URL leaves out have the values of the example.
        values = {**initial_of(EXAMPLE), "hardware": "", **_first(data or {})}
        super().__init__(values)
        for spec in setting_fields():
            if spec.name in GROUP_SETTINGS:
                self.fields[spec.name] = setting_field(spec)
        for name, text in SHORT_HELP.items():
            self.fields[name].help_text = text
        self._hardware()
        style_inputs(self)

    def _hardware(self) -> None:
        field = self.fields["hardware"]
        assert isinstance(field, forms.ChoiceField)
        field.choices = [("", "Other")] + [
            (
                label,
                [(f"{backend}:{h.name}", h.label) for h in catalogue().of(backend)],
            )
            for backend, label in BACKENDS.items()
        ]

    def question(self) -> PlannerInputs | None:
        """None with errors at their fields."""
        if not self.is_valid():
            return None
        names = {field.name for field in dataclasses.fields(PlannerInputs)}
        values = {name: value for name, value in self.cleaned_data.items() if name in names}
        if values["usd_h"] is None:
            values["usd_h"] = self.list_price()
        return PlannerInputs(**values)

    def list_price(self) -> float | None:
        """List price of the chosen hardware, or None if it is not known."""
        backend, _, name = self.cleaned_data.get("hardware", "").partition(":")
        hardware = catalogue().get(backend, name)
        return None if hardware is None else hardware.price_usd_h

    def point_at(self, field: str, message: str) -> None:
        self.add_error(field if field in self.fields else None, message)

    def query(self, **changes: Any) -> str:
        """Query string with these inputs in a fixed order. Empty inputs are included, so that they
        stay empty."""
        values = {name: self[name].value() for name in self.fields} | changes
        return urlencode({name: "" if v is None else v for name, v in values.items()})


def bounds_of(name: str) -> Bounds:
    """Of a field of :class:`~runs.submit.planner.PlannerInputs`."""
    field = PlannerForm.base_fields.get(name)
    if isinstance(field, NumberField):
        return field.bounds
    spec = next(spec for spec in setting_fields() if spec.name == name)
    if spec.choices:
        return Bounds(choices=spec.choices)
    assert spec.minimum is not None and spec.maximum is not None, name
    return Bounds(least=spec.minimum, most=spec.maximum, whole=spec.kind == "int")


def initial_of(question: PlannerInputs) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else "" if value is None else write_number(value)
        for name, value in dataclasses.asdict(question).items()
    }


def form_query(form: PlannerForm, question: PlannerInputs, rounds: int | None) -> str:
    """Of the submit form's address: what it takes over of a plan of so many rounds."""
    backend, _, hardware = form.cleaned_data.get("hardware", "").partition(":")
    values: dict[str, Any] = {name: getattr(question, name) for name in GROUP_SETTINGS}
    del values["num_replicas"]
    values |= {"replicas": question.num_replicas, "max_tokens": question.tokens}
    if rounds is not None:
        values["total_rounds"] = rounds
    for name, shape in GPT_SIZES.items():
        if shape.parameters == question.parameters:
            values["size"] = name
            if question.tokens_per_step % shape.context == 0:
                values["batch_size"] = question.tokens_per_step // shape.context
    if hardware:
        values |= {"backend": backend, "hardware": hardware}
    return urlencode(values)


def _first(data: Mapping[str, Any]) -> dict[str, Any]:
    """The last value of each query parameter."""
    return {name: data[name] for name in data}
