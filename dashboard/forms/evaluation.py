"""The form of an evaluation: what is measured of a run's checkpoints, how often, and where. Used as
a row of the submit form, and to add an evaluation to a run."""

from __future__ import annotations

from typing import Any

from django import forms

from dashboard.forms.fields import DataSelect, DurationField, style_inputs
from dashboard.forms.pools import PoolChoices
from dashboard.forms.rows import RowForm
from diloco.protocol.evaluation import (
    DATA_CHARS,
    MOST_EXAMPLES,
    MOST_TOKENS,
    TOKENS,
    EvaluationSpec,
)
from executors.registry import BACKENDS
from runs.submit.evaluation_plans import NAME_CHARS, spec_of
from runs.submit.run_draft import PlanDraft

SCHEDULES = [
    ("1", "Every checkpoint"),
    *((str(n), f"Every {n} checkpoints") for n in (2, 5, 10, 20, 50, 100)),
    ("0", "On request"),
]


class EvaluationForm(RowForm):
    """``where`` is ``backend:hardware``, because names of hardware are unique per backend."""

    part = "evaluations"
    fallback = "name"

    name = forms.CharField(
        label="Name", max_length=NAME_CHARS, help_text="e.g. val. It begins the names of charts."
    )
    data = forms.CharField(  # type: ignore[assignment]
        label="Data",
        required=False,
        max_length=DATA_CHARS,
        help_text="URI of token shards, e.g. s3://bucket/validation or "
        "hf://datasets/acme/validation. Leave empty for the held-out data of the run.",
    )
    tokens = forms.IntegerField(
        label="Tokens",
        min_value=0,
        max_value=MOST_TOKENS,
        initial=TOKENS,
        help_text="Of the data, for loss and perplexity. 0 measures neither.",
    )
    tasks = forms.CharField(
        label="Benchmark tasks",
        required=False,
        max_length=1500,
        help_text="Tasks of lm-eval, separated by commas, e.g. arc_easy, hellaswag.",
    )
    examples = forms.IntegerField(
        label="Examples",
        min_value=0,
        max_value=MOST_EXAMPLES,
        initial=0,
        help_text="Of each task. 0 takes all.",
    )
    every = forms.TypedChoiceField(label="When", coerce=int, initial="1")
    where = forms.ChoiceField(label="Where")
    credential = forms.ChoiceField(label="Credential", required=False)
    timeout_s = DurationField(
        label="Time limit", required=True, initial=3600, help_text="Of one attempt, e.g. 30m."
    )
    max_attempts = forms.IntegerField(label="Attempts", min_value=1, max_value=10, initial=3)

    def __init__(
        self,
        data: Any = None,
        *,
        choices: PoolChoices,
        index: int | str = "",
        initial: dict[str, Any] | None = None,
        is_changed: bool = False,
    ) -> None:
        first = {"where": f"{choices.first.backend}:{choices.first.hardware}"}
        super().__init__(data, index=index, initial=first | (initial or {}))
        schedules = list(SCHEDULES)
        stored = str(self["every"].value())
        if stored not in dict(schedules) and stored.isdecimal() and len(stored) < 6:
            schedules.append((stored, f"Every {stored} checkpoints"))
        for name, options in (
            ("every", schedules),
            ("where", choices.hardware),
            ("credential", choices.credentials),
        ):
            field = self.fields[name]
            assert isinstance(field, forms.ChoiceField)
            if name != "every":
                field.widget = DataSelect(choices.option_data)
            field.choices = options
        if is_changed:
            self.fields["name"].disabled = True
        style_inputs(self)

    def clean_tasks(self) -> tuple[str, ...]:
        text = self.cleaned_data["tasks"].replace("\n", ",")
        return tuple(name.strip() for name in text.split(",") if name.strip())

    def clean_credential(self) -> int | None:
        text, backend = self.cleaned_data["credential"], self._backend()
        if not text:
            return None
        widget: Any = self.fields["credential"].widget
        kind = widget.data.get(text, {}).get("backend", "")
        if kind != backend:
            raise forms.ValidationError(
                f"Choose a credential for {BACKENDS.get(backend, backend)}, or the server's "
                "environment."
            )
        return int(text)

    def _backend(self) -> str:
        return str(self.cleaned_data.get("where", "")).partition(":")[0]

    def draft(self) -> PlanDraft:
        """The plan of a valid form. Raises :class:`~runs.exceptions.InvalidRun`."""
        values = self.cleaned_data
        backend, _, hardware = values["where"].partition(":")
        spec: EvaluationSpec = spec_of(
            **{name: values[name] for name in ("tokens", "tasks", "examples")},
            data=values["data"].strip(),
        )
        return PlanDraft(
            name=values["name"].strip(),
            spec=spec,
            backend=backend,
            hardware=hardware,
            **{name: values[name] for name in ("every", "credential", "timeout_s", "max_attempts")},
        )

    def place(self, field: str, message: str) -> None:
        """Attach a domain error to its field."""
        super().place({"backend": "where", "hardware": "where"}.get(field, field), message)


def initial_of_plan(plan: PlanDraft) -> dict[str, Any]:
    """Initial values of a form or row."""
    spec = plan.spec
    return {
        "name": plan.name,
        "data": spec.data,
        "tokens": spec.tokens,
        "tasks": ", ".join(spec.tasks),
        "examples": spec.examples,
        "every": str(plan.every),
        "where": f"{plan.backend}:{plan.hardware}",
        "credential": "" if plan.credential is None else str(plan.credential),
        "timeout_s": plan.timeout_s,
        "max_attempts": plan.max_attempts,
    }
