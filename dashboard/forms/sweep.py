"""The sweep part of the submit form: values of some fields, and limits of all runs together."""

from __future__ import annotations

from typing import Any

from django import forms

from runs.queries.comparison import MEASURES
from runs.submit.run_draft import RunDraft
from runs.submit.sweep_space import MOST_RUNS, TEXT_LENGTH, parameters_of, parse_lines
from runs.submit.sweeps import DEFAULT_METRIC, METRICS, SweepDraft

LABELS = {measure.name: measure.label for measure in MEASURES}


class SweepForm(forms.Form):
    sweep = forms.CharField(
        label="Values",
        required=False,
        max_length=TEXT_LENGTH,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 3, "placeholder": "inner_lr = 1e-4, 3e-4, 1e-3"}),
        help_text="One field a line, by its label or its name in documents: a list of values, or a "
        "range such as 1e-4..1e-2 x5 log or 2..8 x4. Every combination is a run, at most "
        f"{MOST_RUNS}. Leave empty for one run.",
    )
    sweep_parallel = forms.IntegerField(
        label="Runs at a time",
        required=False,
        min_value=0,
        max_value=MOST_RUNS,
        help_text="The others start as these end. Leave empty for all at once.",
    )
    sweep_budget_usd = forms.FloatField(
        label="Budget of the sweep",
        required=False,
        min_value=0,
        help_text="Stop all its runs once they have spent this much together. Leave empty for no "
        "limit.",
    )
    sweep_metric = forms.ChoiceField(
        label="Rank by",
        required=False,
        choices=[(name, LABELS[name]) for name in METRICS],
        initial=DEFAULT_METRIC,
    )

    @property
    def is_sweep(self) -> bool:
        return bool((self["sweep"].value() or "").strip())

    def sweep_of(self, draft: RunDraft) -> SweepDraft | None:
        """The sweep of a valid form; None for one run. Raises :class:`InvalidRun`."""
        values: dict[str, Any] = self.cleaned_data
        pairs = parse_lines(values.get("sweep", ""))  # it is missing after an error
        if not pairs:
            return None
        return SweepDraft(
            draft=draft,
            parameters=parameters_of(pairs, draft),
            metric=values.get("sweep_metric") or DEFAULT_METRIC,
            parallel=values.get("sweep_parallel") or 0,
            budget_usd=values.get("sweep_budget_usd") or 0.0,
        )
