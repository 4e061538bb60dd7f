"""The form of a board: its name, the runs, and a row for each panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django import forms
from django.http import QueryDict

from runs.actions.shared_rows import NAME_LENGTH
from runs.queries.boards import AXES, MOST_PANELS, Panel
from runs.queries.search import LONGEST

SPARE = 2
"""Empty rows for more panels."""


class BoardForm(forms.Form):
    name = forms.CharField(
        max_length=NAME_LENGTH,
        widget=forms.TextInput(attrs={"class": "input", "autocomplete": "off"}),
    )
    query = forms.CharField(
        max_length=LONGEST,
        required=False,
        label="Filter",
        help_text="The newest 20 runs that match are shown, e.g. tag:paper is:active",
        widget=forms.TextInput(
            attrs={"class": "input", "autocomplete": "off", "spellcheck": "false"}
        ),
    )
    shared = forms.BooleanField(required=False, label="Shared with all users")


def panels_in(values: QueryDict) -> tuple[list[Panel], str]:
    """The panels of the rows that have a metric, and what is wrong with the first invalid one."""
    columns = [
        values.getlist(name)[: MOST_PANELS + SPARE] for name in ("metric", "x", "smooth", "scale")
    ]
    panels, problem = [], ""
    for number, (metric, x, smooth, scale) in enumerate(zip(*columns, strict=False), start=1):
        if not metric:
            continue
        try:
            weight = float(smooth or 0)
        except ValueError:
            weight = -1.0
        panel = Panel(metric=metric, x=x, smooth=weight, log=scale == "log")
        panels.append(panel)
        if panel.problem() and not problem:
            problem = f"Panel {number}: {panel.problem()}"
    return panels, problem


def panel_rows(panels: Sequence[Panel], metrics: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of the form: the panels, and empty rows for more."""
    spare = [None] * min(SPARE, MOST_PANELS - len(panels))
    offered = metrics | {panel.metric: metrics.get(panel.metric, panel.metric) for panel in panels}
    return [
        {
            "number": number,
            "panel": panel,
            "metrics": [
                (name, label, panel is not None and name == panel.metric)
                for name, label in offered.items()
            ],
            "axes": [
                (name, label, panel is not None and name == panel.x) for name, label in AXES.items()
            ],
        }
        for number, panel in enumerate([*panels, *spare], start=1)
    ]
