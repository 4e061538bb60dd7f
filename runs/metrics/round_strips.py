"""A round's contributions, packed in its row: what the heatmap and the timeline draw.

A run of 256 replicas and 5,000 rounds has 1.3 million contributions. A page that shows them all
cannot read a row for each, so a round keeps strips, indexed by the replica's number, and a
list:

- ``outcomes``: one byte, a place in :data:`OUTCOMES`; 0 is no contribution;
- ``timings``: :data:`TIMING`, when it began (wall time, for people), the seconds of each of
  :data:`GROUPS`, and the norms of what was given and what came of it. Unknown is 0;
- ``cosines``: :data:`COSINE`, of what was given to the mean of the round. Unknown is 0;
- ``lateness``: :data:`LATE`, by how much the late ones missed the plan, of those where it is known.

They repeat :class:`runs.models.Contribution` and are written in the same transactions, but for
"healing", which is no contribution and comes from :mod:`runs.metrics.healing`. From them come the
run's own curves by round (:func:`curves`), filed like any other series.
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
"""Stored by place: only ever added to. The last stands where there is no contribution."""
HEALING = OUTCOMES.index("healing")

GROUPS: Mapping[str, tuple[str, ...]] = {
    "compute": ("compute",),
    "upload": ("encode", "upload"),
    "wait": ("wait",),
    "apply": ("download", "reduce", "apply"),
    "other": ("other",),
}
"""Phases as they are drawn, in the order in which they follow each other in a round."""

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

_LONGEST_S = 1e9
"""A phase's seconds come from other machines; more than this does not fit the strip."""


def entry(contribution: Any) -> tuple[int, tuple[Any, ...]]:
    """Outcome and timing of one contribution (a model, or a migration's)."""
    started: datetime | None = contribution.started_at
    phases = contribution.phases or {}
    return OUTCOMES.index(contribution.state) if contribution.state in OUTCOMES else 0, (
        started.timestamp() if started else 0.0,
        tuple(min(sum(float(phases.get(p, 0)) for p in ps), _LONGEST_S) for ps in GROUPS.values()),
        contribution.norm or 0.0,
        contribution.update_norm or 0.0,
    )


def late_s(row: Any, contribution: Any) -> float | None:
    """Seconds from the round's plan (its commit, where no plan was read) to a late contribution.

    None where that is not known, or the round took it in its plan and was void. The times are of
    two machines' clocks: for a person to read, nothing is decided by it.
    """
    closed = row.planned_at or row.committed_at
    if contribution.state != ContributionState.LATE or closed is None:
        return None
    phases = contribution.phases or {}
    came: datetime | None = contribution.uploaded_at
    if came is None and contribution.started_at is not None and "upload" in phases:
        took_s = sum(float(phases.get(p, 0)) for p in ("compute", *GROUPS["upload"]))
        if took_s < _LONGEST_S:
            came = contribution.started_at + timedelta(seconds=took_s)
    seconds = (came - closed).total_seconds() if came is not None else 0.0
    return round(seconds, 3) if 0 < seconds < _LONGEST_S else None


def latenesses(data: bytes) -> dict[int, float]:
    """Replica number -> seconds, of a round's ``lateness``."""
    return {int(number): float(late) for number, late in np.frombuffer(data, dtype=LATE)}


def put(row: Any, entries: Iterable[tuple[int, Any]]) -> None:
    """Set (replica number, contribution) in the strips of ``row``; the caller saves it."""
    entries = list(entries)
    found = [(number, *entry(contribution)) for number, contribution in entries]
    if not found:
        return
    late = latenesses(bytes(getattr(row, "lateness", b"")))  # an older migration's row has none
    for number, contribution in entries:
        late.pop(number, None)
        if (seconds := late_s(row, contribution)) is not None:
            late[number] = seconds
    row.lateness = np.array(sorted(late.items()), dtype=LATE).tobytes()
    size = max(len(row.outcomes), max(number for number, *_ in found) + 1)
    outcomes, timings = unpack(bytes(row.outcomes), bytes(row.timings), size)
    for number, outcome, timing in found:
        outcomes[number], timings[number] = outcome, timing
    row.outcomes, row.timings = outcomes.tobytes(), timings.tobytes()
    towards = cosines(_told(row), size)
    for number, contribution in entries:
        towards[number] = getattr(contribution, "cosine", None) or 0.0
    row.cosines = towards.tobytes() if towards.any() else b""


def _told(row: Any) -> bytes:
    return bytes(getattr(row, "cosines", b""))  # an older migration's row has none


def cosines(data: bytes, size: int) -> NDArray[Any]:
    """Of ``size`` replicas, to the mean of a round; 0 where none was told."""
    found = np.zeros(size, dtype=COSINE)
    known = np.frombuffer(data, dtype=COSINE)[:size]
    found[: len(known)] = known
    return found


def unpack(outcomes: bytes, timings: bytes, size: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Arrays of ``size`` replicas, which may be more than the strips know."""
    one, two = np.zeros(size, dtype=np.uint8), np.zeros(size, dtype=TIMING)
    known = np.frombuffer(outcomes, dtype=np.uint8)[:size]
    times = np.frombuffer(timings, dtype=TIMING)[:size]
    one[: len(known)], two[: len(times)] = known, times
    return one, two


def rebuild(row: Round) -> Round:
    """All of it from the table, after many of the round's contributions have changed. Who was
    healing, and has given nothing since, stays so."""
    locked = Round.objects.select_for_update().get(pk=row.pk)
    rows = Contribution.objects.filter(round=row).select_related("replica")
    heals = healing(bytes(locked.outcomes))
    locked.outcomes, locked.timings, locked.lateness, locked.cosines = b"", b"", b"", b""
    put(locked, [(c.replica.number, c) for c in rows])
    heal(locked, heals)
    locked.save(update_fields=STRIPS)
    return locked


def healing(outcomes: bytes) -> list[int]:
    """Numbers of the replicas that were catching up."""
    found: list[int] = np.flatnonzero(np.frombuffer(outcomes, dtype=np.uint8) == HEALING).tolist()
    return found


def heal(row: Any, numbers: Iterable[int]) -> None:
    """Mark those of ``numbers`` that gave nothing; the caller saves it."""
    size = max([len(row.outcomes), *(number + 1 for number in numbers)])
    outcomes, timings = unpack(bytes(row.outcomes), bytes(row.timings), size)
    for number in numbers:
        outcomes[number] = outcomes[number] or HEALING
    row.outcomes, row.timings = outcomes.tobytes(), timings.tobytes()


def curves(run: Run, rows: Sequence[Round]) -> dict[str, Points]:
    """The run's own series by round, as far as these rounds tell: mean, lowest and highest norm of
    the contributions and cosine to their mean, norm of the outer update, and mean seconds in each
    of :data:`GROUPS`."""
    sync_every = int(run.group_settings["sync_every"])
    found: dict[str, list[tuple[Any, ...]]] = {}
    for row in sorted(rows, key=lambda r: r.number):
        outcomes, timings = unpack(bytes(row.outcomes), bytes(row.timings), len(row.outcomes))
        values = _values(outcomes, timings, cosines(_told(row), len(outcomes)))
        if not values:
            continue
        ends = timings["started"] + timings["phases"].sum(axis=1)
        wall_s = row.committed_at.timestamp() if row.committed_at else float(ends.max())
        place = (row.number * sync_every, row.number, row.tokens_total or run.tokens, wall_s)
        for name, value in values.items():
            found.setdefault(name, []).append((*place, value))
    return {name: points_of(entries) for name, entries in found.items()}


def _values(
    outcomes: NDArray[Any], timings: NDArray[Any], towards: NDArray[Any]
) -> dict[str, float]:
    included = outcomes == OUTCOMES.index("included")
    given = timings[included]
    values: dict[str, float] = {}
    norms = given["norm"][given["norm"] > 0]
    if len(norms):
        values |= {
            "norm": float(norms.mean()),
            "norm_low": float(norms.min()),
            "norm_high": float(norms.max()),
        }
    told = towards[included]
    told = told[told != 0].astype(float)
    if len(told):
        values |= {
            "cosine": float(told.mean()),
            "cosine_low": float(told.min()),
            "cosine_high": float(told.max()),
        }
    updates = given["update_norm"][given["update_norm"] > 0]
    if len(updates):
        values["update_norm"] = float(updates.mean())
    phases = timings["phases"][timings["phases"].sum(axis=1) > 0]
    if len(phases):
        means = phases.mean(axis=0)
        values |= {f"phase_{name}": float(s) for name, s in zip(GROUPS, means, strict=True)}
    return values


def points_of(entries: Sequence[tuple[Any, ...]]) -> Points:
    """(step, round, tokens, wall, value) of each."""
    step, round_, tokens, wall_s, value = zip(*entries, strict=True)
    return Points.of(step=step, round=round_, tokens=tokens, wall_s=wall_s, value=value)
