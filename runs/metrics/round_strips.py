"""Round strips: the contributions of a round, packed into its row for heatmap and timeline.

A run of 256 replicas and 5,000 rounds has 1.3 million contributions, too many to read one row each
for a page. A round therefore has three arrays indexed by replica number, and a list:

- ``outcomes``: one byte, an index into :data:`OUTCOMES`; 0 means no contribution.
- ``timings``: :data:`TIMING`: the start (wall time, for display), the seconds of each of
  :data:`GROUPS`, and the norms of the contribution and of the outer update. 0 means unknown.
- ``cosines``: :data:`COSINE` of the contribution to the mean of the round. 0 means unknown.
- ``lateness``: :data:`LATE`: the delay of late contributions, where it is known.

They duplicate :class:`runs.models.Contribution` and are written in the same transactions. The
exception is "healing", which is no contribution and comes from :mod:`runs.metrics.healing`. The
series of the run by round (:func:`curves`) are computed from the strips.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runs.metrics.blocks import Points
from runs.models import Contribution, Round, Run
from runs.states import ContributionState

OUTCOMES = ("", "uploaded", "included", "late", "refused", "healing")
"""Stored by index, so entries are only appended. "healing" marks a missing contribution."""
HEALING = OUTCOMES.index("healing")

GROUPS: Mapping[str, tuple[str, ...]] = {
    "compute": ("compute",),
    "upload": ("encode", "upload"),
    "wait": ("wait",),
    "apply": ("download", "reduce", "apply"),
    "other": ("other",),
}
"""Groups of phases that pages draw, in their order within a round."""

TIMING = np.dtype(
    [
        ("started", "<f8"),
        ("phases", "<f4", (len(GROUPS),)),
        ("norm", "<f8"),
        ("update_norm", "<f8"),
    ]
)

COSINE = np.dtype("<f4")

LATE = np.dtype([("replica", "<u4"), ("late_s", "<f4")])

STRIPS = ("outcomes", "timings", "lateness", "cosines")
"""Columns of a round that :func:`put` sets."""

_NO_PHASES = (0.0,) * len(GROUPS)
_LONGEST_S = 1e9
"""Replicas report the seconds of phases; longer ones do not fit the strip."""


def entry(contribution: Any) -> tuple[int, tuple[Any, ...]]:
    """(outcome, timing) of one contribution."""
    started: datetime | None = contribution.started_at
    phases = contribution.phases or {}
    return OUTCOMES.index(contribution.state) if contribution.state in OUTCOMES else 0, (
        started.timestamp() if started else 0.0,
        tuple(min(sum(float(phases.get(p, 0)) for p in ps), _LONGEST_S) for ps in GROUPS.values())
        if phases
        else _NO_PHASES,
        contribution.norm or 0.0,
        contribution.update_norm or 0.0,
    )


def late_s(row: Any, contribution: Any) -> float | None:
    """Seconds from the plan of a round (or its commit, if no plan was read) to a late contribution.

    None if unknown, or if the plan included the contribution and the round became void. The times
    come from two clocks; they are for display only.
    """
    closed = row.planned_at or row.committed_at
    if contribution.state != ContributionState.LATE or closed is None:
        return None
    phases = contribution.phases or {}
    uploaded: datetime | None = contribution.uploaded_at
    if uploaded is None and contribution.started_at is not None and "upload" in phases:
        took_s = sum(float(phases.get(p, 0)) for p in ("compute", *GROUPS["upload"]))
        if took_s < _LONGEST_S:
            uploaded = contribution.started_at + timedelta(seconds=took_s)
    seconds = (uploaded - closed).total_seconds() if uploaded is not None else 0.0
    return round(seconds, 3) if 0 < seconds < _LONGEST_S else None


def latenesses(data: bytes) -> dict[int, float]:
    """Parse ``lateness`` of a round: replica number -> seconds."""
    return {int(number): float(late) for number, late in np.frombuffer(data, dtype=LATE)}


def put(row: Any, entries: Iterable[tuple[int, Any]]) -> None:
    """Set (replica number, contribution) entries in the strips of ``row``; the caller saves it."""
    entries = list(entries)
    if not entries:
        return
    late = latenesses(bytes(row.lateness))
    for number, contribution in entries:
        late.pop(number, None)
        if (seconds := late_s(row, contribution)) is not None:
            late[number] = seconds
    row.lateness = np.array(sorted(late.items()), dtype=LATE).tobytes()
    size = max(len(row.outcomes), max(number for number, _ in entries) + 1)
    outcomes, timings = unpack(bytes(row.outcomes), bytes(row.timings), size)
    towards = cosines(bytes(row.cosines), size)
    for number, contribution in entries:
        outcomes[number], timings[number] = entry(contribution)
        towards[number] = contribution.cosine or 0.0
    row.outcomes, row.timings = outcomes.tobytes(), timings.tobytes()
    # Without the unknown ones at the end: their number depends on the order of the entries.
    row.cosines = np.trim_zeros(towards, "b").tobytes()


def cosines(data: bytes, size: int) -> NDArray[Any]:
    """Parse ``cosines`` for ``size`` replicas; 0 where unknown."""
    return _array(data, COSINE, size)


def unpack(outcomes: bytes, timings: bytes, size: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Parse ``outcomes`` and ``timings`` for ``size`` replicas; missing entries are 0."""
    return _array(outcomes, np.dtype(np.uint8), size), _array(timings, TIMING, size)


def _array(data: bytes, kind: np.dtype[Any], size: int) -> NDArray[Any]:
    result = np.zeros(size, dtype=kind)
    known = np.frombuffer(data, dtype=kind)[:size]
    result[: len(known)] = known
    return result


def rebuild(row: Round) -> Round:
    """Recompute all strips from the table of contributions, and save them.

    Healing replicas without a contribution remain marked.
    """
    locked = Round.objects.select_for_update().get(pk=row.pk)
    rows = Contribution.objects.filter(round=row).select_related("replica")
    heals = healing(bytes(locked.outcomes))
    locked.outcomes, locked.timings, locked.lateness, locked.cosines = b"", b"", b"", b""
    put(locked, [(c.replica.number, c) for c in rows])
    heal(locked, heals)
    locked.save(update_fields=STRIPS)
    return locked


def healing(outcomes: bytes) -> list[int]:
    """Numbers of the replicas that are marked as healing."""
    numbers: list[int] = np.flatnonzero(np.frombuffer(outcomes, dtype=np.uint8) == HEALING).tolist()
    return numbers


def heal(row: Any, numbers: Sequence[int]) -> None:
    """Mark these replicas without a contribution as healing, and no others; the caller saves
    ``row``."""
    size = max([len(row.outcomes), *(number + 1 for number in numbers)])
    outcomes, timings = unpack(bytes(row.outcomes), bytes(row.timings), size)
    was_healing = np.flatnonzero(outcomes == HEALING)
    outcomes[was_healing] = 0
    for number in numbers:
        outcomes[number] = outcomes[number] or HEALING
    # A mark that is gone leaves no empty entry at the end.
    while size and outcomes[size - 1] == 0 and size - 1 in was_healing:
        size -= 1
    row.outcomes, row.timings = outcomes[:size].tobytes(), timings[:size].tobytes()


def curves(run: Run, rows: Sequence[Round]) -> dict[str, Points]:
    """Series of the run by round, from the strips of these rounds.

    They are the mean, minimum and maximum of contribution norms and of cosines to the mean, the
    norm of the outer update, and the mean seconds of each of :data:`GROUPS`.
    """
    sync_every = run.settings.sync_every
    entries: dict[str, list[tuple[Any, ...]]] = {}
    for row in sorted(rows, key=lambda r: r.number):
        outcomes, timings = unpack(bytes(row.outcomes), bytes(row.timings), len(row.outcomes))
        values = _values(outcomes, timings, cosines(bytes(row.cosines), len(outcomes)))
        if not values:
            continue
        ends = timings["started"] + timings["phases"].sum(axis=1)
        wall_s = row.committed_at.timestamp() if row.committed_at else float(ends.max())
        place = (row.number * sync_every, row.number, row.tokens_total or run.tokens, wall_s)
        for name, value in values.items():
            entries.setdefault(name, []).append((*place, value))
    return {name: points_of(values) for name, values in entries.items()}


def _values(
    outcomes: NDArray[Any], timings: NDArray[Any], towards: NDArray[Any]
) -> dict[str, float]:
    included = outcomes == OUTCOMES.index("included")
    timing = timings[included]
    values: dict[str, float] = {}
    norms = timing["norm"][timing["norm"] > 0]
    if len(norms):
        values |= {
            "norm": float(norms.mean()),
            "norm_low": float(norms.min()),
            "norm_high": float(norms.max()),
        }
    known = towards[included]
    known = known[known != 0].astype(float)
    if len(known):
        values |= {
            "cosine": float(known.mean()),
            "cosine_low": float(known.min()),
            "cosine_high": float(known.max()),
        }
    updates = timing["update_norm"][timing["update_norm"] > 0]
    if len(updates):
        values["update_norm"] = float(updates.mean())
    phases = timings["phases"][timings["phases"].sum(axis=1) > 0]
    if len(phases):
        means = phases.mean(axis=0)
        values |= {f"phase_{name}": float(s) for name, s in zip(GROUPS, means, strict=True)}
    return values


def points_of(entries: Sequence[tuple[Any, ...]]) -> Points:
    """Points from (step, round, tokens, wall time, value) tuples."""
    step, round_, tokens, wall_s, value = zip(*entries, strict=True)
    return Points.of(step=step, round=round_, tokens=tokens, wall_s=wall_s, value=value)
