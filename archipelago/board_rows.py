"""Rows of comparisons, and of boards: saved comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from archipelago.rows import Row, RunHeader


@dataclass(frozen=True, kw_only=True)
class Difference(Row):
    """A setting in which runs differ, with one value per run."""

    name: str
    label: str
    values: list[Any]


@dataclass(frozen=True, kw_only=True)
class Comparison(Row):
    """``runs`` in the requested order; the first is the baseline. ``measures`` are the results of
    each by name; null: not known."""

    runs: list[RunHeader]
    measures: list[dict[str, float | None]]
    differences: list[Difference]


@dataclass(frozen=True, kw_only=True)
class Panel(Row):
    """A chart: ``metric`` by ``x`` (tokens, wall or money). ``smooth`` is the weight of a moving
    average, 0 for none; ``log``: the vertical axis is logarithmic."""

    metric: str
    x: str
    smooth: float
    log: bool


@dataclass(frozen=True, kw_only=True)
class Board(Row):
    """A saved comparison of the ``runs`` with these ids; without any, of the newest ones that match
    ``query``."""

    id: int
    name: str
    owner: str
    mine: bool
    shared: bool
    runs: list[str]
    query: str
    panels: list[Panel]
    changed_at: str | None


@dataclass(frozen=True, kw_only=True)
class BoardResult(Row):
    """``values`` are the results of a run by measure; null: not known."""

    run: RunHeader
    values: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class BoardResults(Row):
    """A board with the results of its runs. ``measures`` are the names of the values in display
    order."""

    board: Board
    measures: list[str]
    results: list[BoardResult]


@dataclass(frozen=True, kw_only=True)
class Boards(Row):
    boards: list[Board]
