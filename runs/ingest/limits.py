"""What a run's telemetry may say: how much of it, and which steps, rounds, times and values.

A segment comes from a machine that we do not control. It is refused by name, as a whole, if it has
more rows than a replica writes (:mod:`diloco.protocol.telemetry` has the numbers, and the writer
splits what is more), or speaks of steps, rounds and times that the run cannot have. Values are
different: a loss may be anything, so one that sums could not hold is taken for infinite, and
durations and counts are cut off at the largest that makes sense. So no sum can overflow a column.
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

INT_LIMIT = 2**53
"""Counters above this are not exact in a browser, and no training gets there."""
SMALL_LIMIT = 2**31 - 1
VALUE_LIMIT = 1e100
"""Beyond every 32-bit number, so no loss or norm of a training; its square is still finite."""
SECONDS_LIMIT = 1e9
"""Of a phase: thirty years."""
TOTAL_SECONDS_LIMIT = 1e15
LATEST_WALL_S = 4_102_444_800.0
"""2100-01-01, in seconds since 1970. Times before 1970 and after this are no times of a run."""

MAX_BLOCKS = 2 + 2 * MAX_STEPS // BLOCK_STEPS
"""Blocks of steps that one segment reaches into. A replica's steps follow each other, but for the
jumps of one that catches up."""
ROUNDS_AHEAD = 64
"""Rounds that telemetry may be ahead of the commits that have been ingested, as they were read at
another moment. Further ahead, the bucket must hold the commit."""


def finite(value: float | None) -> float | None:
    """The value, or None where a column of the database, or a sum of some, cannot hold it."""
    if value is None or not math.isfinite(value) or abs(value) > VALUE_LIMIT:
        return None
    return value


def measured(column: Iterable[float]) -> NDArray[Any]:
    """A column of measured values; those beyond :data:`VALUE_LIMIT` are infinite."""
    found = np.asarray(tuple(column), dtype=float)
    found[found > VALUE_LIMIT] = np.inf
    found[found < -VALUE_LIMIT] = -np.inf
    return found


def count(value: int, name: str, *, limit: int = INT_LIMIT) -> int:
    if not 0 <= value <= limit:
        raise BadRecord(f"{name}: expected 0 to {limit}, found {value}")
    return value


def add(total: int, more: Iterable[int]) -> int:
    """A sum of counts that stops at the largest count there is."""
    return min(total + sum(more), INT_LIMIT)


def is_wall_time(value: float) -> bool:
    return 0 <= value <= LATEST_WALL_S


@dataclass(frozen=True, kw_only=True)
class RunBounds:
    """The rounds and steps that a run can have; ``next_round`` is the first that is not ingested.

    A run has as many rounds as it is to commit, and its void ones. A replica trains on while its
    last exchanges are under way, one for each fragment.
    """

    last_round: int
    last_step: int
    next_round: int

    @classmethod
    def of(cls, run: Run) -> RunBounds:
        settings = run.group_settings
        void = max(run.next_round - 1 - run.committed_rounds, 0)
        fragments = int(settings.get("num_fragments", 1))
        rounds = int(settings["total_rounds"]) + void + fragments + ROUNDS_AHEAD
        last_step = (rounds + 1) * int(settings["sync_every"])
        return cls(
            last_round=min(rounds, SMALL_LIMIT),
            last_step=min(last_step, MAX_KEY),
            next_round=run.next_round,
        )


def check_segment(segment: Segment, bounds: RunBounds) -> None:
    """:class:`BadRecord`, naming the field, for what the tables should not take."""
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
    """:class:`BadRecord` for a round that nothing shows to be committed. At most one request."""
    told = [report.round for report in segment.rounds]
    told += [evaluation.round for evaluation in segment.evaluations]
    newest = max(told, default=0)
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
    """About how long it takes to store a segment, in units of a few microseconds."""
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
    """Blocks of a series that these steps lie in. Each is a row, and one more of each level."""
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


def _at_most(found: tuple[Any, ...] | Mapping[str, Any], limit: int, name: str) -> None:
    if len(found) > limit:
        raise BadRecord(f"{name}: expected at most {limit}, found {len(found)}")


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
    if not is_wall_time(value):  # neither is NaN
        raise BadRecord(f"{name}: expected a time between 1970 and 2100, found {value}")
