"""Bounds of a run's telemetry: sizes, steps, rounds, times and values.

Segments come from machines that we do not control. A segment is refused as a whole, naming the
field, if it has more rows than a replica writes (limits in :mod:`diloco.protocol.telemetry`; the
writer splits larger ones) or contains steps, rounds or times that the run cannot have. Values are
clamped instead: an extreme loss becomes infinite, and durations and counts stop at the largest
plausible value. So no sum can overflow a column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.protocol import keys
from diloco.protocol.records import BadRecord
from diloco.protocol.telemetry import (
    MAX_EVALUATIONS,
    MAX_LOGS,
    MAX_PHASES,
    MAX_ROUNDS,
    MAX_STEPS,
    MAX_SYSTEM,
    Segment,
)
from diloco.store.base import MissingKey, NotAnObject, Store
from runs.metrics.blocks import BLOCK_STEPS, MAX_KEY
from runs.models import Run
from runs.times import is_wall_time

INT_LIMIT = 2**53
"""Larger integers are not exact in a browser, and no training reaches them."""
SMALL_LIMIT = 2**31 - 1
VALUE_LIMIT = 1e100
"""Larger than any 32-bit float; its square is still finite."""
SECONDS_LIMIT = 1e9
"""Of one phase: about thirty years."""
TOTAL_SECONDS_LIMIT = 1e15

MAX_BLOCKS = 2 + 2 * MAX_STEPS // BLOCK_STEPS
"""Step blocks that one segment can touch. A replica's steps are consecutive except when it catches
up."""
ROUNDS_AHEAD = 64
"""Rounds by which telemetry can be ahead of the ingested commits, which are read at another moment.
Beyond that the bucket must hold the commit."""


def finite(value: float | None) -> float | None:
    """The value, or None if a column, or a sum of such values, cannot hold it."""
    if value is None or not math.isfinite(value) or abs(value) > VALUE_LIMIT:
        return None
    return value


def measured(column: Iterable[float]) -> NDArray[Any]:
    """A column of measurements; values beyond :data:`VALUE_LIMIT` become infinite."""
    values = np.asarray(tuple(column), dtype=float)
    values[values > VALUE_LIMIT] = np.inf
    values[values < -VALUE_LIMIT] = -np.inf
    return values


def count(value: int, name: str, *, limit: int = INT_LIMIT) -> int:
    if not 0 <= value <= limit:
        raise BadRecord(f"{name}: expected 0 to {limit}, found {value}")
    return value


def add(total: int, more: Iterable[int]) -> int:
    """A sum of counts, capped at :data:`INT_LIMIT`."""
    return min(total + sum(more), INT_LIMIT)


@dataclass(frozen=True, kw_only=True)
class RunBounds:
    """The rounds and steps that a run can have; ``next_round`` is the first that is not ingested.

    A run has its committed rounds and its void ones. A replica keeps training while its last
    exchanges, one per fragment, are in flight.
    """

    last_round: int
    last_step: int
    next_round: int

    @classmethod
    def of(cls, run: Run) -> RunBounds:
        settings = run.settings
        void = max(run.next_round - 1 - run.committed_rounds, 0)
        rounds = settings.total_rounds + void + settings.num_fragments + ROUNDS_AHEAD
        last_step = (rounds + 1) * settings.sync_every
        return cls(
            last_round=min(rounds, SMALL_LIMIT),
            last_step=min(last_step, MAX_KEY),
            next_round=run.next_round,
        )


def check_segment(segment: Segment, bounds: RunBounds) -> None:
    """Raise :class:`BadRecord`, naming the field, for values that the tables must not store."""
    _check_sizes(segment)
    _check_columns(segment, bounds)
    for report in segment.rounds:
        count(report.round, "rounds.round", limit=bounds.last_round)
        count(report.requests, "rounds.requests", limit=SMALL_LIMIT)
        count(report.contributors, "rounds.contributors", limit=SMALL_LIMIT)
        count(report.bytes_up, "rounds.bytes_up")
        count(report.bytes_down, "rounds.bytes_down")
        count(report.step, "rounds.step", limit=bounds.last_step)
        count(report.tokens, "rounds.tokens")
        for name in ("phases", "background"):
            _at_most(getattr(report, name), MAX_PHASES, f"rounds.{name}")
    for evaluation in segment.evaluations:
        count(evaluation.round, "evaluations.round", limit=bounds.last_round)
        count(evaluation.tokens, "evaluations.tokens")
        _check_wall("evaluations.wall_s", evaluation.wall_s)


def check_rounds(segment: Segment, bounds: RunBounds, store: Store) -> None:
    """Raise :class:`BadRecord` if the newest round is not committed. Costs at most one request."""
    rounds = [report.round for report in segment.rounds]
    rounds += [evaluation.round for evaluation in segment.evaluations]
    newest = max(rounds, default=0)
    if newest < bounds.next_round + ROUNDS_AHEAD:
        return
    try:
        store.get_range(keys.commit(newest), 0, 1)
    except (MissingKey, NotAnObject):
        raise BadRecord(
            f"round: expected a committed one, found {newest} while round {bounds.next_round} is "
            "the first that is not committed"
        ) from None


def work_of(segment: Segment) -> int:
    """Estimated cost of storing a segment, in units of a few microseconds."""
    reported = _blocks(report.step for report in segment.rounds)
    steps = _blocks(segment.steps.step) + min(reported, MAX_BLOCKS)
    return (
        len(segment.steps.step)
        + 10 * len(segment.logs)
        + 100 * len(segment.rounds)
        + 50 * len(segment.evaluations)
        + 300 * max(steps - 2, 0)
    )


def _blocks(steps: Iterable[int]) -> int:
    """Blocks that these steps touch. Each is one row, plus one row per downsampling level."""
    return len({step // BLOCK_STEPS for step in steps})


def _check_sizes(segment: Segment) -> None:
    _at_most(segment.steps.step, MAX_STEPS, "steps")
    blocks = _blocks(segment.steps.step)
    if blocks > MAX_BLOCKS:
        raise BadRecord(
            f"steps.step: expected steps in at most {MAX_BLOCKS} blocks of {BLOCK_STEPS}, found "
            f"{blocks}"
        )
    _at_most(segment.rounds, MAX_ROUNDS, "rounds")
    _at_most(segment.evaluations, MAX_EVALUATIONS, "evaluations")
    _at_most(segment.logs, MAX_LOGS, "logs")
    _at_most(segment.system, MAX_SYSTEM, "system")


def _at_most(rows: tuple[Any, ...] | Mapping[str, Any], limit: int, name: str) -> None:
    if len(rows) > limit:
        raise BadRecord(f"{name}: expected at most {limit}, found {len(rows)}")


def _check_columns(segment: Segment, bounds: RunBounds) -> None:
    steps = segment.steps
    length = len(steps.step)
    for name in ("round", "wall_s", "tokens"):
        if len(getattr(steps, name)) != length:
            raise BadRecord(f"expected {length} of {name}, found {len(getattr(steps, name))}")
    for name in ("loss", "lr", "grad_norm", "step_s"):
        if len(getattr(steps, name)) not in (0, length):
            raise BadRecord(f"expected {length} of {name}, found {len(getattr(steps, name))}")
    if not length:
        return
    limits = {"step": bounds.last_step, "round": bounds.last_round, "tokens": INT_LIMIT}
    for name, limit in limits.items():
        column = getattr(steps, name)
        count(min(column), f"steps.{name}", limit=limit)
        count(max(column), f"steps.{name}", limit=limit)
    for value in steps.wall_s:
        _check_wall("steps.wall_s", value)


def _check_wall(name: str, value: float) -> None:
    if not is_wall_time(value):  # NaN is refused, too
        raise BadRecord(f"{name}: expected a time between 1970 and 2100, found {value}")
