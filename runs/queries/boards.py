"""Boards: their panels, the runs that they show, and their rows."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User

from archipelago import board_rows
from runs.json_values import finite, iso, mapping, row_of, texts
from runs.metrics.evaluation_series import PREFIX
from runs.models import Board, MetricBlock, Run
from runs.queries import comparison, selectors
from runs.queries.comparison import MEASURES, METRICS, MOST
from runs.queries.search import BadQuery, matching, parse

AXES = {"tokens": "Tokens", "wall": "Wall time", "money": "Cost"}
MOST_PANELS = 12
MOST_SMOOTH = 0.98
METRIC_LENGTH = 120
METRICS_OFFERED = 100
_RESULT = re.compile(rf"{PREFIX}[A-Za-z0-9._-]+")
"""A series of evaluation results."""


def is_metric(name: str) -> bool:
    return name in METRICS or (len(name) <= METRIC_LENGTH and _RESULT.fullmatch(name) is not None)


@dataclass(frozen=True, kw_only=True)
class PanelProblem:
    """Why a field of a panel, ``metric``, ``x`` or ``smooth``, cannot be drawn."""

    field: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart of a board: a metric by ``x``, one of :data:`AXES`. ``smooth`` is the weight of the
    moving average, 0 to :data:`MOST_SMOOTH`; ``log``: the vertical axis is logarithmic."""

    metric: str = "eval_loss"
    x: str = "tokens"
    smooth: float = 0.0
    log: bool = False

    def problem(self) -> PanelProblem | None:
        """The field that cannot be drawn; None if all can."""
        if not is_metric(self.metric):
            known = ", ".join((*METRICS, f"{PREFIX}<plan>-<metric>"))
            message = f"expected a metric of {known}, found {self.metric[:METRIC_LENGTH]!r}"
            return PanelProblem(field="metric", message=message)
        if self.x not in AXES:
            message = f"expected an axis of {', '.join(AXES)}, found {self.x[:40]!r}"
            return PanelProblem(field="x", message=message)
        if not 0 <= self.smooth <= MOST_SMOOTH:
            message = f"expected a number from 0 to {MOST_SMOOTH}, found {self.smooth}"
            return PanelProblem(field="smooth", message=message)
        return None

    @classmethod
    def of(cls, stored: Any) -> Self:
        """A stored panel; whatever it does not hold has its default."""
        values = mapping(stored)
        smooth = values.get("smooth")
        smooth = finite(smooth) if isinstance(smooth, int | float) else None
        found = cls(
            metric=str(values.get("metric", "")),
            x=str(values.get("x", "")),
            smooth=min(max(smooth or 0.0, 0.0), MOST_SMOOTH),
            log=values.get("log") is True,
        )
        return found if not found.problem() else cls()


DEFAULT_PANELS = (Panel(), Panel(metric="loss", smooth=0.6))


def panels_of(board: Board) -> list[Panel]:
    stored = board.panels if isinstance(board.panels, list) else []
    return [Panel.of(each) for each in stored[:MOST_PANELS]] or list(DEFAULT_PANELS)


def metric_label(name: str) -> str:
    return METRICS.get(name, name.removeprefix(PREFIX).replace("-", " "))


def runs_of(board: Board, user: AbstractBaseUser | AnonymousUser) -> list[Run]:
    """The runs of a board that a user can see, in its order or the newest first."""
    visible = selectors.runs_for(user).prefetch_related("pools")
    if ids := ids_of(board):
        by_id = {run.pk: run for run in visible.filter(pk__in=ids)}
        return [by_id[pk] for pk in ids if pk in by_id]
    try:
        terms = parse(board.query)
    except BadQuery:  # of an earlier version
        return []
    # ``is:mine`` means the runs of the board's owner, so that a shared board shows the same to all.
    found = matching(visible, terms, user=board.owner).order_by("-created_at", "-id")
    return list(found[:MOST]) if board.query else []


def metrics_offered(runs: Sequence[Run]) -> dict[str, str]:
    """Metrics that panels can show and their labels: the fixed ones, and the evaluation results of
    the runs. One query."""
    found = (
        MetricBlock.objects.filter(run__in=runs, replica=None, series__startswith=PREFIX, level=0)
        .order_by("series")
        .values_list("series", flat=True)
        .distinct()
    )
    return METRICS | {name: metric_label(name) for name in found[:METRICS_OFFERED]}


def ids_of(board: Board) -> list[uuid.UUID]:
    result = []
    for text in texts(board.runs)[:MOST]:
        try:
            result.append(uuid.UUID(text))
        except ValueError:
            continue
    return result


def board_row(board: Board, *, user: User) -> dict[str, Any]:
    """The board as the API returns it."""
    return row_of(
        board_rows.Board,
        board,
        owner=board.owner.get_username(),
        mine=board.owner_id == user.pk,
        runs=[str(pk) for pk in ids_of(board)],
        panels=[asdict(panel) for panel in panels_of(board)],
        changed_at=iso(board.changed_at),
    )


def results(board: Board, *, user: User) -> dict[str, Any]:
    """The row of :class:`archipelago.board_rows.BoardResults`."""
    runs = runs_of(board, user)
    return {
        "board": board_row(board, user=user),
        "measures": [measure.name for measure in MEASURES],
        "results": [
            {"run": selectors.run_header(run), "values": values}
            for run, values in zip(runs, comparison.measured(runs), strict=True)
        ],
    }


def metrics_of(panels: Sequence[Panel]) -> tuple[str, ...]:
    """The metrics of panels, each once."""
    return tuple(dict.fromkeys(panel.metric for panel in panels))
