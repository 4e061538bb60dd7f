"""The form of a board: its name, the runs, and a row for each panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from django import forms
from django.http import QueryDict

from runs.actions.shared_rows import NAME_LENGTH
from runs.queries.boards import AXES, MOST_PANELS, Panel, PanelProblem
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


@dataclass(frozen=True, kw_only=True)
class PanelRow:
    """A panel as it is in the form: ``smooth`` is the text that was sent."""

    panel: Panel
    smooth: str
    problem: PanelProblem | None = None

    @classmethod
    def of(cls, panel: Panel) -> Self:
        return cls(panel=panel, smooth=f"{panel.smooth:g}")

    @classmethod
    def sent(cls, metric: str, x: str, smooth: str, scale: str) -> Self:
        try:
            panel = Panel(metric=metric, x=x, smooth=float(smooth or 0), log=scale == "log")
            problem = panel.problem()
        except ValueError:
            panel = Panel(metric=metric, x=x, log=scale == "log")
            message = f"expected a number, found {smooth[:40]!r}"
            problem = PanelProblem(field="smooth", message=message)
        return cls(panel=panel, smooth=smooth, problem=problem)


def panels_in(values: QueryDict) -> list[PanelRow]:
    """The rows that have a metric."""
    columns = [
        values.getlist(name)[: MOST_PANELS + SPARE] for name in ("metric", "x", "smooth", "scale")
    ]
    return [PanelRow.sent(*cells) for cells in zip(*columns, strict=False) if cells[0]]


def panel_rows(rows: Sequence[PanelRow], metrics: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of the form: the panels, and empty rows for more."""
    spare = [None] * min(SPARE, MOST_PANELS - len(rows))
    used = [row.panel.metric for row in rows]
    offered = metrics | {name: metrics.get(name, name) for name in used}
    return [
        {
            "number": number,
            "panel": row and row.panel,
            "smooth": row.smooth if row else "0",
            "metrics": [
                (name, label, row is not None and name == row.panel.metric)
                for name, label in offered.items()
            ],
            "axes": [
                (name, label, row is not None and name == row.panel.x)
                for name, label in AXES.items()
            ],
            "at": {name: _errors(number, name, row) for name in ("metric", "x", "smooth")},
        }
        for number, row in enumerate([*rows, *spare], start=1)
    ]


def errors_of(name: str, *messages: str) -> dict[str, Any]:
    """What ``partials/errors.html`` needs of a part of the form that is no field of Django."""
    return {"auto_id": name, "html_name": name, "errors": messages}


def _errors(number: int, name: str, row: PanelRow | None) -> dict[str, Any]:
    problem = row.problem if row else None
    messages = [problem.message] if problem and problem.field == name else []
    return errors_of(f"panels.{number - 1}.{name}", *messages)
