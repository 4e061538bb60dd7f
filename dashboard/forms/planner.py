"""The planner's inputs: read from the address, which holds all of them, and written back into it.

Numbers are taken as people write them (``1B``, ``500k``). Group settings have the fields they have
in the submit form. What is allowed is said here once: the API's question has :func:`bounds_of` too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django import forms

from dashboard.forms.fields import dress, setting_field
from diloco.protocol.settings import setting_fields
from diloco.protocol.workload import GPT_SIZES
from executors.registry import BACKENDS
from runs.backends.executors import catalogue
from runs.submit.planner import Question

_NUMBER = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([kMGBT]?)\s*", re.IGNORECASE)
_TIMES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}

EXAMPLE = Question(
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
"""What the planner shows to somebody who says nothing."""

GROUP_SETTINGS = (
    "num_replicas", "sync_every", "codec", "num_fragments", "overlap_steps", "reduce_plan",
    "min_quorum",
)  # fmt: skip

SHORT_HELP = {
    "num_replicas": "",
    "sync_every": "Between two exchanges.",
    "codec": "Of what is exchanged.",
    "num_fragments": "Exchanged in turn.",
    "overlap_steps": "Hide that much of an exchange.",
    "reduce_plan": "auto: the fastest.",
    "min_quorum": "With fewer the run waits.",
}
"""The submit form says more; here there is a curve that shows what a setting does."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a number may be, both ends included; or, with ``choices``, a word."""

    least: float = 0
    most: float = 1e18
    whole: bool = False
    choices: tuple[str, ...] = ()


class NumberField(forms.CharField):
    """``1B``, ``150M``, ``500k``, ``1e9``, ``2.5``; of ``whole`` numbers the value is an int."""

    def __init__(
        self, *, least: float = 0, most: float = 1e18, whole: bool = False, **options: Any
    ) -> None:
        super().__init__(max_length=40, **options)
        self.bounds = Bounds(least=least, most=most, whole=whole)

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value)
        if not text:
            return None
        found = _NUMBER.fullmatch(text)
        try:
            number = float(found[1].replace(",", "")) * _TIMES[found[2].lower()] if found else None
        except ValueError:
            number = None
        if number is None:
            raise forms.ValidationError(
                f"expected a number such as 2.5, 500k or 1B, found {text!r}"
            )
        bounds = self.bounds
        if not bounds.least <= number <= bounds.most:
            raise forms.ValidationError(
                f"expected {bounds.least:g} or more, at most {bounds.most:g}, found {text!r}"
            )
        if bounds.whole and number != int(number):
            raise forms.ValidationError(f"expected a whole number, found {text!r}")
        return int(number) if bounds.whole else number

    def prepare_value(self, value: Any) -> Any:
        return write_number(value) if isinstance(value, int | float) else value

    def run_validators(self, value: Any) -> None:
        """Those of a text do not fit a number."""


def write_number(value: float) -> str:
    """As :class:`NumberField` reads it, without losing a digit: ``20B``, ``65536``, ``0.1``."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size and float(f"{value / size:.4g}") * size == value:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.15g}"


class PlannerForm(forms.Form):
    """Field names are :class:`~runs.submit.planner.Question`'s, and ``hardware``.

    Times and bandwidths begin where they still mean something: of 1e-300 the arithmetic makes
    numbers that no float holds.
    """

    parameters = NumberField(
        label="Parameters", least=1, most=1e14, whole=True, help_text="Such as 150M or 1B."
    )
    tokens = NumberField(
        label="Tokens to train", least=1, most=9e15, whole=True, help_text="Of all replicas."
    )
    hardware = forms.ChoiceField(
        label="Hardware", required=False, help_text="Gives the price. Measure the step time."
    )
    step_s = NumberField(
        label="Inner step", least=1e-6, most=86_400, help_text="Of one replica, measured."
    )
    tokens_per_step = NumberField(
        label="Tokens a step", least=1, most=1e10, whole=True, help_text="Of one replica."
    )
    mbit_s = NumberField(
        label="Bandwidth", least=1e-3, most=1e7,
        help_text="Of one replica to the bucket, each way.",
    )  # fmt: skip
    latency_s = NumberField(
        label="Store latency", most=60, help_text="Until the first byte of a request."
    )
    mtbf_h = NumberField(
        label="A replica fails every", least=1e-3, most=1e6, required=False,
        help_text="Mean time of one replica. Empty: never.",
    )  # fmt: skip
    replace_s = NumberField(
        label="Replaced after", most=1e6, help_text="From its death to its successor's start."
    )
    usd_h = NumberField(
        label="Price", most=1e5, required=False,
        help_text="Of one replica. Empty: the hardware's list price.",
    )  # fmt: skip
    egress_usd_gb = NumberField(
        label="Egress", most=100, help_text="Of each GB read. 0 in the bucket's own region."
    )

    def __init__(self, data: Any = None) -> None:
        # An address that names a few inputs means the example's values for the others.
        given = {**initial_of(EXAMPLE), "hardware": "", **_first(data or {})}
        super().__init__(given)
        for spec in setting_fields():
            if spec.name in GROUP_SETTINGS:
                self.fields[spec.name] = setting_field(spec)
        for name, text in SHORT_HELP.items():
            self.fields[name].help_text = text
        self._hardware()
        dress(self)

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

    def question(self) -> Question | None:
        """None with errors at their fields."""
        if not self.is_valid():
            return None
        names = {field.name for field in dataclasses.fields(Question)}
        values = {name: value for name, value in self.cleaned_data.items() if name in names}
        if values["usd_h"] is None:
            values["usd_h"] = self.list_price()
        return Question(**values)

    def list_price(self) -> float | None:
        """Of the hardware that was chosen, where the list knows one."""
        backend, _, name = self.cleaned_data.get("hardware", "").partition(":")
        found = catalogue().get(backend, name)
        return None if found is None else found.price_usd_h

    def point_at(self, field: str, message: str) -> None:
        self.add_error(field if field in self.fields else None, message)

    def query(self, **changes: Any) -> str:
        """Of an address with these inputs, in a fixed order; what is empty is named, so that it
        stays empty."""
        values = {name: self[name].value() for name in self.fields} | changes
        return urlencode({name: "" if v is None else v for name, v in values.items()})


def bounds_of(name: str) -> Bounds:
    """Of a field of :class:`~runs.submit.planner.Question`."""
    field = PlannerForm.base_fields.get(name)
    if isinstance(field, NumberField):
        return field.bounds
    spec = next(spec for spec in setting_fields() if spec.name == name)
    if spec.choices:
        return Bounds(choices=spec.choices)
    assert spec.minimum is not None and spec.maximum is not None, name
    return Bounds(least=spec.minimum, most=spec.maximum, whole=spec.kind == "int")


def initial_of(question: Question) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else "" if value is None else write_number(value)
        for name, value in dataclasses.asdict(question).items()
    }


def form_query(form: PlannerForm, question: Question, rounds: int | None) -> str:
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
    """Of a query, the last value of each name."""
    return {name: data[name] for name in data}
