"""Data of the heatmap (outcomes per round and replica) and of the timeline (phases over time).

Both read the strips of :mod:`runs.metrics.round_strips` and never the table of contributions, so
256 replicas and 5,000 rounds take a few thousand rows. Bars thinner than a pixel are aggregated
into a raster: a cell has the largest non-compute phase and its share of the cell's time. The raster
is summed over batches of rounds, so memory does not grow with their number.

Times are wall-clock times of several machines, for display only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runs.metrics.round_strips import GROUPS, LATE, OUTCOMES
from runs.metrics.round_sums import RoundSums, Strips
from runs.models import Round, Run

MAX_BARS = 5000
"""A window with more bars than this is sent as a raster."""
AT_ONCE = 60_000
"""Contributions per batch, each taking about 200 bytes of memory."""
MARGIN = 2
"""Rounds before and after a window whose bars can reach into it."""

DOWN = len(GROUPS)
"""Class of the time between two rounds of a replica, after the indices of the groups."""
ROUND_COLUMNS = 4
"""A window whose rounds are narrower than this many columns is sent as a raster. Its cells then
cover whole rounds: a grid of columns that cuts rounds of nearly its own width has a moiré."""
MAX_COMMITS = 400
"""A window with more commits than this is sent without them: a page draws them ten pixels apart."""
BLANK = 255
"""Value of a cell before the first or after the last round of a replica."""
LEVELS = 15
"""A cell is 16 times its class plus its share of time, from 0 to 15."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcomes:
    """Outcomes of all contributions.

    Attributes:
        numbers: numbers of the rounds.
        states: states of the rounds.
        committed: wall times of the commits; 0 where unknown.
        tokens: tokens of the run after each round.
        outcomes: round x replica, indices into OUTCOMES.
        late: entries of late contributions with a known delay.
        late_in: for each of them, the index of its round.
    """

    numbers: list[int]
    states: list[str]
    committed: NDArray[np.float64]
    tokens: NDArray[np.int64]
    outcomes: NDArray[np.uint8]
    late: NDArray[Any]
    late_in: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bars:
    """One bar per round and replica: ``started`` (wall time) and the seconds of each group."""

    number: NDArray[np.int64]
    replica: NDArray[np.int64]
    outcome: NDArray[np.uint8]
    started: NDArray[np.float64]
    phases: NDArray[np.float64]


def _join(parts: Sequence[Bars]) -> Bars:
    """Join bars, sorted by replica, then by round."""
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
class RoundBatch:
    """Arrays of consecutive rounds.

    ``outcome`` and ``started`` are replica x round, ``phases`` is group x replica x round.
    ``started`` is 0 where unknown.
    """

    numbers: NDArray[np.int64]
    outcome: NDArray[np.uint8]
    started: NDArray[np.float64]
    phases: NDArray[np.float64]

    @classmethod
    def of(cls, strips: Strips) -> RoundBatch:
        timing = strips.timings
        started = np.array(timing["started"].T, order="C")  # a copy: the strips are read-only
        phases = np.ascontiguousarray(timing["phases"].transpose(2, 1, 0), dtype=np.float64)
        started[phases.sum(axis=0) <= 0] = 0
        return cls(
            numbers=strips.numbers,
            outcome=np.ascontiguousarray(strips.outcomes.T),
            started=started,
            phases=phases,
        )

    def inside(self, low: float, high: float) -> NDArray[np.bool_]:
        """Which bars reach into a window."""
        ends = self.started + self.phases.sum(axis=0)
        result: NDArray[np.bool_] = (self.started > 0) & (self.started < high) & (ends > low)
        return result

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
    """The timeline of the window [low, high) in wall time.

    Attributes:
        first: start of the data of the run.
        last: end of the data of the run.
        commits: (round, wall time, state); none if there are more than :data:`MAX_COMMITS`.
        bars: None if there is a raster.
        cells: raster, replica x column; None if there are bars.
        slowest: the replica that most often contributed last, and the number of those rounds.
        counted: rounds in which a replica contributed.
    """

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


_OUTCOME_COLUMNS = ("number", "state", "outcomes", "lateness", "committed_at", "tokens_total")


def outcomes(run: Run, *, below: int | None = None) -> Outcomes:
    """Outcomes of all rounds, or of those with numbers below ``below``. One query."""
    rounds = Round.objects.filter(run=run).order_by("number")
    if below is not None:
        rounds = rounds.filter(number__lt=below)
    rows = list(rounds.values_list(*_OUTCOME_COLUMNS))
    size = max((len(row[2]) for row in rows), default=0)
    matrix = np.zeros((len(rows), size), dtype=np.uint8)
    for i, (_, _, strip, *_) in enumerate(rows):
        matrix[i, : len(strip)] = np.frombuffer(bytes(strip), dtype=np.uint8)
    late = [bytes(row[3]) for row in rows]
    return Outcomes(
        numbers=[row[0] for row in rows],
        states=[str(row[1]) for row in rows],
        committed=np.array([row[4].timestamp() if row[4] else 0.0 for row in rows]),
        tokens=np.array([row[5] for row in rows], dtype=np.int64),
        outcomes=matrix,
        late=np.frombuffer(b"".join(late), dtype=LATE),
        late_in=np.repeat(np.arange(len(rows)), [len(one) // LATE.itemsize for one in late]),
    )


def timeline(run: Run, *, low: float | None, high: float | None, columns: int) -> Timeline:
    """The timeline between two wall times (None: the ends of the data). Two queries.

    ``columns`` is the width of the raster, if there are too many bars.
    """
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
    even = np.linspace(low, high, columns + 1)
    edges = _edges(even, commits[(commits > low) & (commits < high)])
    if edges is even:
        drawn = _placed(run, numbers, edges)
    else:
        drawn = _summed(run, numbers, commits[picked], edges)
    slowest, counted = drawn.slowest.most()
    inside = np.flatnonzero((commits >= low) & (commits < high))
    return Timeline(
        low=low,
        high=high,
        first=first,
        last=last,
        replicas=drawn.replicas,
        commits=[
            (rows[i][0], float(commits[i]), str(rows[i][1]))
            for i in (inside.tolist() if len(inside) <= MAX_COMMITS else ())
        ],
        bars=drawn.bars,
        cells=None if drawn.cells is None else _stretched(drawn.cells, edges, even),
        slowest=slowest,
        counted=counted,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Drawn:
    """Bars or cells of a window."""

    replicas: int
    bars: Bars | None
    cells: NDArray[np.uint8] | None
    slowest: _Slowest


def _placed(run: Run, numbers: Sequence[int], edges: NDArray[np.float64]) -> _Drawn:
    """Bars, or if there are too many, cells in which each phase is at its position in time."""
    low, high = edges[0], edges[-1]
    raster, slow = Raster(edges), _Slowest()
    bars: list[Bars] = []
    pending: list[RoundBatch] = []
    total = replicas = 0
    for strips in _batches(run, numbers):
        batch = RoundBatch.of(strips)
        inside = batch.inside(low, high)
        slow.add(batch, inside)
        pending.append(batch)
        replicas = max(replicas, len(batch.started))
        total += int(inside.sum())
        bars = [*bars, batch.bars(inside)] if total <= MAX_BARS else []
        if total > MAX_BARS or len(pending) > 1:  # the raster is slow, and often not needed
            for one in pending:
                raster.add(one)
            pending = []
    few = total <= MAX_BARS
    return _Drawn(
        replicas=replicas,
        bars=_join(bars) if few else None,
        cells=None if few else raster.cells(),
        slowest=slow,
    )


def _summed(
    run: Run, numbers: Sequence[int], commits: NDArray[np.float64], edges: NDArray[np.float64]
) -> _Drawn:
    """Cells from sums over groups of whole rounds. Rounds that are open or longer than a cell are
    placed in time, and so are those at the end of the window."""
    widths = np.diff(edges)
    raster, slow = Raster(edges), _Slowest()
    sums = RoundSums(columns=len(widths))
    took = np.diff(commits, prepend=np.nan)
    column = np.searchsorted(edges, commits) - 1
    early = column < 0
    column = column.clip(0, len(widths) - 1)
    placed = ~(commits <= edges[-1]) | (took > widths[column])
    done = 0
    for strips in _batches(run, numbers):
        here = slice(done, done + len(strips.numbers))
        done = here.stop
        whole = ~placed[here] & ~early[here]
        sums.add(strips.take(whole), column[here][whole])
        if placed[here].any():
            batch = RoundBatch.of(strips.take(placed[here]))
            slow.add(batch, batch.inside(edges[0], edges[-1]))
            raster.add(batch)
    raster.merge(sums)
    slow.counts = _grown(slow.counts, len(sums.slow))
    slow.counts[: len(sums.slow)] += sums.slow
    return _Drawn(replicas=len(raster.first), bars=None, cells=raster.cells(), slowest=slow)


def _edges(even: NDArray[np.float64], commits: NDArray[np.float64]) -> NDArray[np.float64]:
    """The edges of the raster's cells: ``even``, or the ends of groups of whole rounds if rounds
    are narrow. A group that is much wider than the others, as by a pause, is divided evenly."""
    columns = len(even) - 1
    if len(commits) * ROUND_COLUMNS <= columns:
        return even
    together = -(-len(commits) * ROUND_COLUMNS // columns)
    edges = np.unique([even[0], *np.sort(commits)[::together], even[-1]])
    wide = np.diff(edges) > 3 * np.median(np.diff(edges))
    inside = np.searchsorted(edges, even, side="right") - 1
    return np.union1d(edges, even[np.append(wide, False)[inside.clip(0, len(wide))]])


def _stretched(
    cells: NDArray[np.uint8], edges: NDArray[np.float64], even: NDArray[np.float64]
) -> NDArray[np.uint8]:
    """Cells of the columns between ``even`` edges, from those between ``edges``."""
    if edges is even:
        return cells
    middle = (even[1:] + even[:-1]) / 2
    return cells[:, np.searchsorted(edges, middle, side="right") - 1]


def _ends(run: Run, commits: NDArray[np.float64]) -> tuple[float, float]:
    begun = (run.first_step_at or run.started_at or run.created_at).timestamp()
    known = commits[~np.isnan(commits)]
    seen = run.last_seen_at.timestamp() if run.last_seen_at else begun
    return min([begun, *known.tolist()[:1]]), max([begun + 1.0, seen, *known.tolist()[-1:]])


def _picked(commits: NDArray[np.float64], low: float, high: float) -> slice:
    """Rounds that can have a bar in the window, by their commits; an open round is the last."""
    rising = np.maximum.accumulate(np.where(np.isnan(commits), -np.inf, commits))
    begin = int(np.searchsorted(rising, low)) - MARGIN
    end = int(np.searchsorted(rising, high, side="right")) + 1 + MARGIN
    return slice(max(begin, 0), end)


def _batches(run: Run, numbers: Sequence[int]) -> Iterator[Strips]:
    """Strips of these rounds in batches of :data:`AT_ONCE` contributions. One query."""
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
            yield Strips.of(part)
            part = []
    if part:
        yield Strips.of(part)


@dataclass
class _Slowest:
    """Counts how often each replica was the last to finish its upload."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, batch: RoundBatch, inside: NDArray[np.bool_]) -> None:
        included = inside & (batch.outcome == OUTCOMES.index("included"))
        counted = included.any(axis=0)
        if not counted.any():
            return
        done = np.where(included, batch.started + batch.phases[0] + batch.phases[1], -np.inf)
        last = done[:, counted].argmax(axis=0)
        size = max(len(self.counts), len(included))
        self.counts = _grown(self.counts, size) + np.bincount(last, minlength=size)

    def most(self) -> tuple[tuple[int, int] | None, int]:
        if not self.counts.any():
            return None, 0
        return (int(self.counts.argmax()), int(self.counts.max())), int(self.counts.sum())


def raster(
    batches: Iterable[RoundBatch], low: float, high: float, columns: int
) -> NDArray[np.uint8]:
    """Cells, replica x column: :data:`BLANK`, or the largest non-compute class and its share of
    time. ``batches`` are consecutive rounds."""
    result = Raster(np.linspace(low, high, columns + 1))
    for batch in batches:
        result.add(batch)
    return result.cells()


class Raster:
    """Sums the time of each cell by class, batch by batch."""

    def __init__(self, edges: NDArray[np.float64]) -> None:
        self.edges = edges
        self.widths = np.diff(edges)
        self.shares = np.zeros((0, DOWN, len(self.widths)))
        self.first = np.zeros(0)
        self.last = np.zeros(0)
        self.over = np.zeros((0, DOWN))
        """End of the counted time of each group, because rounds can overlap."""

    def add(self, batch: RoundBatch) -> None:
        size = max(len(self.first), len(batch.started))
        self.shares, self.over = _grown(self.shares, size), _grown(self.over, size)
        self.first, self.last = _grown(self.first, size, np.inf), _grown(self.last, size, -np.inf)
        groups = [group for group in range(DOWN) if batch.phases[group].any()]
        for replica, started in enumerate(batch.started):
            known = started > 0
            if not known.any():
                continue
            begins = started[known]
            self.first[replica] = min(self.first[replica], begins[0])
            for group in groups:
                took = batch.phases[group, replica][known]
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
        columns = slice(begin, begin + max(len(within) - 1, 0))
        self.shares[replica, group, columns] += np.diff(within) / self.widths[columns]

    def merge(self, sums: RoundSums) -> None:
        """Add the time of rounds that were summed."""
        size = max(len(self.first), len(sums.first))
        known = slice(len(sums.first))
        self.shares, self.over = _grown(self.shares, size), _grown(self.over, size)
        self.first, self.last = _grown(self.first, size, np.inf), _grown(self.last, size, -np.inf)
        self.shares[known] += sums.spent / self.widths
        self.first[known] = np.minimum(self.first[known], sums.first)
        self.last[known] = np.maximum(self.last[known], sums.last)

    def cells(self) -> NDArray[np.uint8]:
        alive = (self.edges[1:] > self.first[:, None]) & (self.edges[:-1] < self.last[:, None])
        down = np.clip(1 - self.shares.sum(axis=1, keepdims=True), 0, 1)
        rest = np.concatenate([self.shares[:, 1:], down], axis=1)
        kind = rest.argmax(axis=1)
        share = np.clip(np.take_along_axis(rest, kind[:, None], axis=1)[:, 0], 0, 1)
        cell = (kind + 1) * 16 + np.rint(share * LEVELS).astype(int)
        return np.where(alive, cell, BLANK).astype(np.uint8)


def _grown(array: NDArray[Any], size: int, fill: float = 0) -> NDArray[Any]:
    """Extend an array to rows for ``size`` replicas, because later strips can have more."""
    more = np.full((size - len(array), *array.shape[1:]), fill, dtype=array.dtype)
    return np.concatenate([array, more]) if len(more) else array
