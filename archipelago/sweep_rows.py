"""Rows of sweeps; see :mod:`archipelago.rows`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from archipelago.rows import Row, RunHeader


@dataclass(frozen=True, kw_only=True)
class SweepParameter(Row):
    """A swept field, e.g. ``settings.inner_lr``, and its values."""

    field: str
    label: str
    values: list[Any]


@dataclass(frozen=True, kw_only=True)
class Sweep(Row):
    """A sweep. ``parallel`` and ``budget_usd`` 0 mean no limit.

    ``held`` of its ``runs`` wait for their turn, ``active`` work or will, ``ended`` have ended.
    ``cost_known`` is false if a part of the cost is unknown.
    """

    id: str
    name: str
    owner: str
    created_at: str | None
    metric: str
    parallel: int
    budget_usd: float | None
    parameters: list[SweepParameter]
    runs: int
    held: int
    active: int
    ended: int
    cost_usd: float | None
    cost_known: bool


@dataclass(frozen=True, kw_only=True)
class SweepRun(Row):
    """A run of a sweep. ``rank`` 1 is the best; None without a value of the metric."""

    rank: int | None
    value: float | None
    values: Mapping[str, Any]
    held: bool
    run: RunHeader


@dataclass(frozen=True, kw_only=True)
class RankedSweep(Row):
    """A sweep with its runs, the best first, ranked by ``metric``."""

    sweep: Sweep
    metric: str
    runs: list[SweepRun]


@dataclass(frozen=True, kw_only=True)
class SweepPage(Row):
    """``next`` is ``before`` of the next page; None on the last page."""

    sweeps: list[Sweep]
    next: str | None
