"""Rounds as they are drawn: who took part in each, and when each replica did what.

Both read the strips of :mod:`runs.metrics.round_strips`, never the table of contributions, so 256
replicas and 5,000 rounds are a few thousand rows. Bars thinner than a pixel are not sent: they
become a raster, in which a cell says how much of its time went to the largest part that is not
computing. It is summed up some rounds at a time, so its memory does not grow with them.

Times are wall-clock labels of several machines, good enough for a picture. Nothing is decided by
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runs.metrics.round_strips import GROUPS, LATE, OUTCOMES, TIMING
from runs.models import Round, Run

MAX_BARS = 5000
"""More than this many rounds of replicas in a window are a raster."""
AT_ONCE = 250_000
"""Contributions that are taken apart at a time: each takes some 200 bytes meanwhile."""
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
    ``late`` are those of whom it is known how late they were, in the rounds ``late_in``."""

    numbers: list[int]
    states: list[str]
    outcomes: NDArray[np.uint8]
    late: NDArray[Any]
    late_in: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bars:
    """One per round and replica: ``started`` (wall time) and the seconds of each group."""

    number: NDArray[np.int64]
    replica: NDArray[np.int64]
    outcome: NDArray[np.uint8]
    started: NDArray[np.float64]
    phases: NDArray[np.float64]


def _together(parts: Sequence[Bars]) -> Bars:
    """One order for all: by replica, then by round."""
    columns = {
        name: np.concatenate([empty, *(getattr(part, name) for part in parts)])
        for name, empty in (
            ("number", np.zeros(0, dtype=np.int64)),
            ("replica", np.zeros(0, dtype=np.int64)),
            ("outcome", np.zeros(0, dtype=np.uint8)),
            ("started", np.zeros(0)),
            ("phases", np.zeros((0, DOWN))),
        )
    }
    order = np.argsort(columns["replica"], kind="stable")
    return Bars(**{name: column[order] for name, column in columns.items()})


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
    late = [bytes(row[3]) for row in rows]
    return Outcomes(
        numbers=[row[0] for row in rows],
        states=[str(row[1]) for row in rows],
        outcomes=found,
        late=np.frombuffer(b"".join(late), dtype=LATE),
        late_in=np.repeat(np.arange(len(rows)), [len(one) // LATE.itemsize for one in late]),
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
    raster, slow = Raster(low, high, columns), _Slowest()
    bars: list[Bars] = []
    waiting: list[Sheet] = []
    total = replicas = 0
    for sheet in _sheets(run, numbers):
        ends = sheet.started + sheet.phases.sum(axis=0)
        inside = (sheet.started > 0) & (sheet.started < high) & (ends > low)
        slow.add(sheet, inside)
        waiting.append(sheet)
        replicas = max(replicas, len(sheet.started))
        total += int(inside.sum())
        bars = [*bars, sheet.bars(inside)] if total <= MAX_BARS else []
        if total > MAX_BARS or len(waiting) > 1:  # a raster that may not be wanted takes its time
            for one in waiting:
                raster.add(one)
            waiting = []
    slowest, counted = slow.most()
    few = total <= MAX_BARS
    return Timeline(
        low=low,
        high=high,
        first=first,
        last=last,
        replicas=replicas,
        commits=[
            (row[0], float(at), str(row[1]))
            for row, at in zip(rows, commits, strict=True)
            if low <= at < high
        ],
        bars=_together(bars) if few else None,
        cells=None if few else raster.cells(),
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


def _sheets(run: Run, numbers: Sequence[int]) -> Iterator[Sheet]:
    """Of these rounds, :data:`AT_ONCE` contributions at a time. One query."""
    if not numbers:
        return
    rows = (
        Round.objects.filter(run=run, number__gte=numbers[0], number__lte=numbers[-1])
        .order_by("number")
        .values_list("number", "outcomes", "timings")
        .iterator(chunk_size=200)
    )
    part: list[tuple[int, bytes, bytes]] = []
    for row in rows:
        part.append((row[0], bytes(row[1]), bytes(row[2])))
        if len(part) * len(row[1]) >= AT_ONCE:
            yield _sheet(part)
            part = []
    if part:
        yield _sheet(part)


def _sheet(rows: Sequence[tuple[int, bytes, bytes]]) -> Sheet:
    size = max(len(strip) for _, strip, _ in rows)
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


@dataclass
class _Slowest:
    """Who gave last, per round: computing and uploading done, the others wait for it."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, sheet: Sheet, inside: NDArray[np.bool_]) -> None:
        given = inside & (sheet.outcome == OUTCOMES.index("included"))
        counted = given.any(axis=0)
        if not counted.any():
            return
        done = np.where(given, sheet.started + sheet.phases[0] + sheet.phases[1], -np.inf)
        last = done[:, counted].argmax(axis=0)
        size = max(len(self.counts), len(given))
        self.counts = _grown(self.counts, size) + np.bincount(last, minlength=size)

    def most(self) -> tuple[tuple[int, int] | None, int]:
        if not self.counts.any():
            return None, 0
        return (int(self.counts.argmax()), int(self.counts.max())), int(self.counts.sum())


def raster(sheets: Iterable[Sheet], low: float, high: float, columns: int) -> NDArray[np.uint8]:
    """A row of cells per replica: :data:`BLANK`, or the largest part that is not computing and its
    share of the cell's time. ``sheets`` are consecutive rounds."""
    made = Raster(low, high, columns)
    for sheet in sheets:
        made.add(sheet)
    return made.cells()


class Raster:
    """What of each cell's time went where, summed up sheet by sheet."""

    def __init__(self, low: float, high: float, columns: int) -> None:
        self.edges = np.linspace(low, high, columns + 1)
        self.width = (high - low) / columns
        self.shares = np.zeros((0, DOWN, columns))
        self.first = np.zeros(0)
        self.last = np.zeros(0)
        self.over = np.zeros((0, DOWN))
        """Until when a group's time is counted: rounds may overlap."""

    def add(self, sheet: Sheet) -> None:
        size = max(len(self.first), len(sheet.started))
        self.shares, self.over = _grown(self.shares, size), _grown(self.over, size)
        self.first, self.last = _grown(self.first, size, np.inf), _grown(self.last, size, -np.inf)
        groups = [group for group in range(DOWN) if sheet.phases[group].any()]
        for replica, started in enumerate(sheet.started):
            known = started > 0
            if not known.any():
                continue
            begins = started[known]
            self.first[replica] = min(self.first[replica], begins[0])
            for group in groups:
                took = sheet.phases[group, replica][known]
                ends = begins + took
                self._spend(replica, group, begins, ends, took)
                begins = ends
            self.last[replica] = max(self.last[replica], begins.max())

    def _spend(
        self,
        replica: int,
        group: int,
        begins: NDArray[np.float64],
        ends: NDArray[np.float64],
        took: NDArray[np.float64],
    ) -> None:
        knots = np.empty(2 * len(took))
        knots[0::2], knots[1::2] = begins, ends
        knots[0] = max(knots[0], self.over[replica, group])
        np.maximum.accumulate(knots, out=knots)
        self.over[replica, group] = knots[-1]
        spent = np.empty(2 * len(took))
        spent[1::2] = np.cumsum(took)
        spent[0::2] = spent[1::2] - took
        # Only the columns that these rounds reach into.
        begin = max(int(np.searchsorted(self.edges, knots[0], side="right")) - 1, 0)
        end = int(np.searchsorted(self.edges, knots[-1])) + 1
        within = np.interp(self.edges[begin:end], knots, spent)
        self.shares[replica, group, begin : begin + len(within) - 1] += (
            np.diff(within) / self.width if len(within) > 1 else 0
        )

    def cells(self) -> NDArray[np.uint8]:
        cells = np.full((len(self.first), len(self.edges) - 1), BLANK, dtype=np.uint8)
        for replica, shares in enumerate(self.shares):
            begun, over = self.edges[1:] > self.first[replica], self.edges[:-1] < self.last[replica]
            alive = begun & over
            down = np.clip(1 - shares.sum(axis=0), 0, 1)
            rest = np.concatenate([shares[1:], down[None]])
            kind = rest.argmax(axis=0)
            share = np.clip(np.take_along_axis(rest, kind[None], axis=0)[0], 0, 1)
            cell = (kind + 1) * 16 + np.rint(share * LEVELS).astype(int)
            cells[replica, alive] = cell[alive]
        return cells


def _grown(array: NDArray[Any], size: int, fill: float = 0) -> NDArray[Any]:
    """With rows for so many replicas: a later strip may know of more."""
    more = np.full((size - len(array), *array.shape[1:]), fill, dtype=array.dtype)
    return np.concatenate([array, more]) if len(more) else array
