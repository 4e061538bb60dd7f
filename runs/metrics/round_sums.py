"""The timeline's raster of many narrow rounds, from sums over groups of whole rounds.

A cell of such a raster covers several rounds, so the time of each phase is summed over them: one
addition per contribution, without their positions in time. Rounds that are longer than a cell are
left to :class:`runs.metrics.timeline.Raster`, which places each phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runs.metrics.round_strips import GROUPS, OUTCOMES, TIMING

INCLUDED = OUTCOMES.index("included")


@dataclass(frozen=True, kw_only=True, eq=False)
class Strips:
    """Strips of consecutive rounds: ``outcomes`` and ``timings`` are round x replica."""

    numbers: NDArray[np.int64]
    outcomes: NDArray[np.uint8]
    timings: NDArray[Any]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, bytes, bytes]]) -> Strips:
        """From (number, outcomes, timings) of rounds. Short strips are padded with 0."""
        size = max(len(outcomes) for _, outcomes, _ in rows)
        width = size * TIMING.itemsize
        return cls(
            numbers=np.array([number for number, *_ in rows], dtype=np.int64),
            outcomes=_table([one[:size].ljust(size, b"\0") for _, one, _ in rows], np.uint8, size),
            timings=_table([one[:width].ljust(width, b"\0") for *_, one in rows], TIMING, size),
        )

    def take(self, rounds: NDArray[np.bool_]) -> Strips:
        if rounds.all():
            return self
        return Strips(
            numbers=self.numbers[rounds],
            outcomes=self.outcomes[rounds],
            timings=self.timings[rounds],
        )


def _table(strips: Sequence[bytes], kind: Any, size: int) -> NDArray[Any]:
    return np.frombuffer(b"".join(strips), dtype=kind).reshape(len(strips), size)


@dataclass
class RoundSums:
    """Sums by replica, group of phases and column.

    Attributes:
        columns: number of columns.
        spent: replica x group x column, in seconds.
        first: start of the first round of a replica.
        last: start of the last one.
        slow: rounds in which a replica was the last to finish its upload.
    """

    columns: int
    spent: NDArray[np.float64] = field(init=False)
    first: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    last: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    slow: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        self.spent = np.zeros((0, len(GROUPS), self.columns))

    def add(self, strips: Strips, column: NDArray[np.int64]) -> None:
        """Add rounds whose columns are ``column``, in rising order."""
        if not len(column):
            return
        self._grow(strips.outcomes.shape[1])
        size = strips.outcomes.shape[1]
        started = np.ascontiguousarray(strips.timings["started"])
        phases = strips.timings["phases"]
        begins = np.flatnonzero(np.append(True, column[1:] != column[:-1]))
        sums = np.add.reduceat(phases, begins, axis=0)
        self.spent[:size, :, column[begins]] += sums.transpose(1, 2, 0)
        known = started > 0
        self.first[:size] = np.minimum(
            self.first[:size], np.where(known, started, np.inf).min(axis=0)
        )
        self.last[:size] = np.maximum(self.last[:size], started.max(axis=0))
        done = started + phases[:, :, 0] + phases[:, :, 1]
        done[(strips.outcomes != INCLUDED) | ~known] = -np.inf
        last = done.argmax(axis=1)[np.isfinite(done.max(axis=1))]
        self.slow[:size] += np.bincount(last, minlength=size)

    def _grow(self, size: int) -> None:
        more = size - len(self.first)
        if more <= 0:
            return
        self.spent = np.concatenate([self.spent, np.zeros((more, *self.spent.shape[1:]))])
        self.first = np.append(self.first, np.full(more, np.inf))
        self.last = np.append(self.last, np.full(more, -np.inf))
        self.slow = np.append(self.slow, np.zeros(more, dtype=np.int64))
