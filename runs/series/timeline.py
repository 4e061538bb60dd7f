"""Rounds as they are drawn: who took part in each, and when each replica did what.

Both read the strips of :mod:`runs.series.strips`, never the table of contributions, so 256 replicas
and 5,000 rounds are a few thousand rows. Bars thinner than a pixel are not sent: they become a
raster, in which a cell says how much of its time went to the largest part that is not computing.

Times are wall-clock labels of several machines, good enough for a picture. Nothing is decided by
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runs.models import Round, Run
from runs.series.strips import GROUPS, OUTCOMES, TIMING, latenesses

MAX_BARS = 5000
"""More than this many rounds of replicas in a window are a raster."""
MARGIN = 2
"""Rounds before and after a window whose bars may reach into it."""

DOWN = len(GROUPS)
"""Class of time between two rounds of a replica; after the groups' places."""
BLANK = 255
"""A cell before a replica's first round, or after its last."""
LEVELS = 15
"""A cell is its class times 16 plus the share of its time, 0 to 15."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcomes:
    """``outcomes[i, r]`` is that of replica r in round ``numbers[i]``, a place in OUTCOMES;
    ``late`` are (i, r, seconds) of contributions of which it is known how late they were."""

    numbers: list[int]
    states: list[str]
    outcomes: NDArray[np.uint8]
    late: list[tuple[int, int, float]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bars:
    """One per round and replica: ``started`` (wall time) and the seconds of each group."""

    number: NDArray[np.int64]
    replica: NDArray[np.int64]
    outcome: NDArray[np.uint8]
    started: NDArray[np.float64]
    phases: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sheet:
    """The same by replica and round: ``started`` is 0 where nothing is known; ``phases`` are
    group x replica x round."""

    numbers: NDArray[np.int64]
    outcome: NDArray[np.uint8]
    started: NDArray[np.float64]
    phases: NDArray[np.float64]

    def bars(self, inside: NDArray[np.bool_]) -> Bars:
        replica, place = np.nonzero(inside)
        return Bars(
            number=self.numbers[place],
            replica=replica,
            outcome=self.outcome[inside],
            started=self.started[inside],
            phases=self.phases[:, inside].T,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """``bars`` or ``cells`` (replica x column), of [low, high); ``commits`` are (round, wall time,
    state). ``first`` and ``last`` are the ends of the run's data. ``slowest``: the replica that
    was the last to give in most of the ``counted`` rounds, and in how many."""

    low: float
    high: float
    first: float
    last: float
    replicas: int
    commits: list[tuple[int, float, str]]
    bars: Bars | None
    cells: NDArray[np.uint8] | None
    slowest: tuple[int, int] | None
    counted: int


def outcomes(run: Run, *, below: int | None = None) -> Outcomes:
    """Of all rounds (``below`` a number), in order. One query."""
    rounds = Round.objects.filter(run=run).order_by("number")
    if below is not None:
        rounds = rounds.filter(number__lt=below)
    rows = list(rounds.values_list("number", "state", "outcomes", "lateness"))
    size = max((len(row[2]) for row in rows), default=0)
    found = np.zeros((len(rows), size), dtype=np.uint8)
    for i, (_, _, strip, _) in enumerate(rows):
        found[i, : len(strip)] = np.frombuffer(bytes(strip), dtype=np.uint8)
    return Outcomes(
        numbers=[row[0] for row in rows],
        states=[str(row[1]) for row in rows],
        outcomes=found,
        late=[
            (i, r, s) for i, row in enumerate(rows) for r, s in latenesses(bytes(row[3])).items()
        ],
    )


def timeline(run: Run, *, low: float | None, high: float | None, columns: int) -> Timeline:
    """Bars or a raster of ``columns`` between two wall times (None: the ends). Two queries."""
    rows = list(
        Round.objects.filter(run=run)
        .order_by("number")
        .values_list("number", "state", "committed_at")
    )
    commits = np.array([r[2].timestamp() if r[2] else np.nan for r in rows])
    first, last = _ends(run, commits)
    low, high = first if low is None else low, last if high is None else high
    high = max(high, low + 1e-3)
    picked = _picked(commits, low, high)
    numbers = [row[0] for row in rows[picked]]
    sheet = _sheet(run, numbers)
    ends = sheet.started + sheet.phases.sum(axis=0)
    inside = (sheet.started > 0) & (sheet.started < high) & (ends > low)
    slowest, counted = _slowest(sheet, inside)
    few = int(inside.sum()) <= MAX_BARS
    return Timeline(
        low=low,
        high=high,
        first=first,
        last=last,
        replicas=sheet.started.shape[0],
        commits=[
            (row[0], float(at), str(row[1]))
            for row, at in zip(rows, commits, strict=True)
            if low <= at < high
        ],
        bars=sheet.bars(inside) if few else None,
        cells=None if few else raster(sheet, low, high, columns),
        slowest=slowest,
        counted=counted,
    )


def _ends(run: Run, commits: NDArray[np.float64]) -> tuple[float, float]:
    begun = (run.first_step_at or run.started_at or run.created_at).timestamp()
    known = commits[~np.isnan(commits)]
    seen = run.last_seen_at.timestamp() if run.last_seen_at else begun
    return min([begun, *known.tolist()[:1]]), max([begun + 1.0, seen, *known.tolist()[-1:]])


def _picked(commits: NDArray[np.float64], low: float, high: float) -> slice:
    """Rounds that may have a bar in the window: by commits, in which an open round is the last."""
    rising = np.maximum.accumulate(np.where(np.isnan(commits), -np.inf, commits))
    begin = int(np.searchsorted(rising, low)) - MARGIN
    end = int(np.searchsorted(rising, high, side="right")) + 1 + MARGIN
    return slice(max(begin, 0), end)


def _sheet(run: Run, numbers: Sequence[int]) -> Sheet:
    rows = []
    if numbers:
        rows = list(
            Round.objects.filter(run=run, number__gte=numbers[0], number__lte=numbers[-1])
            .order_by("number")
            .values_list("number", "outcomes", "timings")
        )
    size = max((len(strip) for _, strip, _ in rows), default=0)
    outcome = np.zeros((len(rows), size), dtype=np.uint8)
    timing = np.zeros((len(rows), size), dtype=TIMING)
    for i, (_, one, two) in enumerate(rows):
        outcome[i, : len(one)] = np.frombuffer(one, dtype=np.uint8)
        timing[i, : len(two) // TIMING.itemsize] = np.frombuffer(two, dtype=TIMING)
    started = np.ascontiguousarray(timing["started"].T)
    phases = np.ascontiguousarray(timing["phases"].transpose(2, 1, 0), dtype=np.float64)
    started[phases.sum(axis=0) <= 0] = 0
    return Sheet(
        numbers=np.array([n for n, *_ in rows], dtype=np.int64),
        outcome=np.ascontiguousarray(outcome.T),
        started=started,
        phases=phases,
    )


def _slowest(sheet: Sheet, inside: NDArray[np.bool_]) -> tuple[tuple[int, int] | None, int]:
    """Who gave last, per round: computing and uploading done, the others wait for it."""
    given = inside & (sheet.outcome == OUTCOMES.index("included"))
    counted = given.any(axis=0)
    if not counted.any():
        return None, 0
    done = np.where(given, sheet.started + sheet.phases[0] + sheet.phases[1], -np.inf)
    counts = np.bincount(done[:, counted].argmax(axis=0))
    return (int(counts.argmax()), int(counts.max())), int(counted.sum())


def raster(sheet: Sheet, low: float, high: float, columns: int) -> NDArray[np.uint8]:
    """A row of cells per replica: :data:`BLANK`, or the largest part that is not computing and its
    share of the cell's time."""
    edges = np.linspace(low, high, columns + 1)
    width = (high - low) / columns
    cells = np.full((len(sheet.started), columns), BLANK, dtype=np.uint8)
    groups = [group for group in range(DOWN) if sheet.phases[group].any()]
    for replica, started in enumerate(sheet.started):
        known = started > 0
        if not known.any():
            continue
        begins = started[known]
        first = begins[0]
        shares = np.zeros((DOWN + 1, columns))
        for group in groups:
            took = sheet.phases[group, replica][known]
            ends = begins + took
            knots = np.empty(2 * len(took))
            knots[0::2], knots[1::2] = begins, ends
            np.maximum.accumulate(knots, out=knots)  # rounds may overlap
            spent = np.empty(2 * len(took))
            spent[1::2] = np.cumsum(took)
            spent[0::2] = spent[1::2] - took
            shares[group] = np.diff(np.interp(edges, knots, spent)) / width
            begins = ends
        alive = (edges[1:] > first) & (edges[:-1] < begins.max())
        shares[DOWN] = np.clip(1 - shares[:DOWN].sum(axis=0), 0, 1)
        rest = shares[1:]
        kind = rest.argmax(axis=0)
        share = np.clip(np.take_along_axis(rest, kind[None], axis=0)[0], 0, 1)
        cell = (kind + 1) * 16 + np.rint(share * LEVELS).astype(int)
        cells[replica, alive] = cell[alive]
    return cells
