"""What about a run deserves somebody's attention: decided from what a tick has seen, without I/O.

:func:`judge` says what is the case now (:class:`Finding`), and what cannot be said now: an alert
about that stays as it is. :mod:`runs.alerts.store` keeps the alerts and tells of them. Left out:
what a webhook says, and whether somebody is asked to act; nothing here changes a run.

| kind | is the case when | until |
| --- | --- | --- |
| nan | a replica's loss was no number | another process of it works, or it ends |
| spike | the newest round's loss is :data:`SPIKE` above the median of those before | it is not |
| stalled | the quorum is live and no round is committed | one is |
| below_quorum | fewer replicas live than the quorum | enough are |
| replica_lost | a replica is lost, or failed for good | it works again, or is let go |
| staleness | :data:`MISSES` rounds in a row without a live replica, or from old weights | not so |
| weights_mismatch | replicas disagree about the weights after a recent round | they agree again |
| goodput | under :data:`GOODPUT` of the recent rounds' time was compute | above, with a margin |
| budget | 80 or 100 % of it is spent | the run ends |
| deadline | the time limit, or backends' deadlines, are near | the run ends, they moved |
| bucket | the rendezvous cannot be read | it can |
| pool | a backend's account needs a person: credential, quota or bill | one has acted |
| quarantined | records were quarantined | the run ends |
| ingest_lag | telemetry is read later than :data:`LAG_S` after it could be | it is not |
| finished | a run ends; told once and over at once | |
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from runs.states import REPLICA_ENDED, REPLICA_LIVE, RUN_ENDED, RUN_LIVE, ReplicaState, RunState

KINDS = {
    "nan": "Loss is no number",
    "spike": "Loss spike",
    "stalled": "Stalled",
    "below_quorum": "Below quorum",
    "replica_lost": "Replica lost",
    "staleness": "Staleness",
    "weights_mismatch": "Weights differ",
    "goodput": "Goodput is low",
    "budget": "Budget",
    "deadline": "Deadline near",
    "bucket": "Bucket unreachable",
    "pool": "Pool blocked",
    "quarantined": "Records quarantined",
    "ingest_lag": "Ingest is late",
    "finished": "Finished",
}
"""Kind -> what people call it."""

SPIKE = 0.2
"""Of the median of the rounds before."""
SPIKE_STEPS = 6.0
"""And so many times the usual change from round to round: a noisy loss is no spike."""
SPIKE_WINDOW = 8
SPIKE_LEAST = 4
"""Rounds that must lie before."""
RECENT = 5
"""Rounds whose time, lateness and digests are looked at."""
MISSES = 3
STALE = 3
"""Rounds by which the weights that a contribution began from may be older than the newest."""
GOODPUT = 0.5
GOODPUT_MARGIN = 0.05
BUDGET_WARNS = 0.8
DEADLINE_S = 600.0
DEADLINE_SHARE = 0.1
"""A deadline is near when less than this share of the time is left, and at most DEADLINE_S."""
LAG_S = 60.0
"""Seconds since ingest was last up to date that are no longer usual."""
SEVERAL = 8
"""More replicas than this with the same trouble make one alert."""


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    number: int
    state: ReplicaState
    reason: str = ""
    fell: bool = False
    """Its job was lost or failed, and it waits to be launched again."""
    nonfinite: bool = False
    """Its current process has reported a loss that is no number."""
    left_s: float | None = None
    """Until its backend ends it; None where it has no deadline, or no job."""
    granted_s: float | None = None
    """What it was given in all."""


@dataclass(frozen=True, kw_only=True)
class PoolView:
    """A pool whose account needs a person."""

    id: int
    name: str
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class RoundsView:
    """The newest committed rounds, oldest first."""

    losses: tuple[tuple[int, float], ...] = ()
    """(round, loss) of up to SPIKE_WINDOW + 1."""
    late: tuple[frozenset[int], ...] = ()
    """Of each of the last RECENT: numbers of the replicas it was committed without."""
    stale: dict[int, int] = field(default_factory=dict)
    """Replica -> by how many rounds its newest contribution's weights were too old."""
    mismatch: tuple[int, ...] = ()
    """Of the last RECENT, those after which replicas disagree."""
    goodput: float | None = None
    """Compute over all seconds of the last RECENT; None before there are as many."""


@dataclass(frozen=True, kw_only=True)
class AlertView:
    state: RunState
    reason: str = ""
    quorum: int = 1
    target: int = 1
    training: bool = False
    replicas: tuple[ReplicaView, ...] = ()
    pools: tuple[PoolView, ...] = ()
    unread_since: datetime | None = None
    """Since when the rendezvous cannot be read, if that is long."""
    unread_because: str = ""
    quarantined: int = 0
    ingest_lag_s: float = 0.0
    losses_read: bool = True
    """``nonfinite`` of the replicas is known."""
    rounds: RoundsView | None = None
    """None when no round was committed since the last look."""
    low_goodput: bool = False
    """It was low when it was looked at last."""
    cost_usd: float = 0.0
    budget_usd: float = 0.0
    age_s: float = 0.0
    time_limit_s: int = 0
    committed: int = 0
    total: int = 0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``subject`` tells alerts of one kind apart; ``replica`` is whom it is about, if one."""

    kind: str
    message: str
    level: str = "warning"
    subject: str = ""
    replica: int | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    findings: tuple[Finding, ...] = ()
    unsaid: frozenset[str | tuple[str, str]] = frozenset()
    """Kinds, or (kind, subject), of which nothing can be said now."""

    def stays(self, kind: str, subject: str) -> bool:
        """Whether an open alert that was not found is left as it is."""
        return kind in self.unsaid or (kind, subject) in self.unsaid


def judge(view: AlertView) -> Verdict:
    if view.state in RUN_ENDED:
        return Verdict(findings=(_finished(view),))
    unsaid: set[str | tuple[str, str]] = set()
    findings = [*_live(view), *_lost(view, unsaid), *_budget(view), *_deadline(view)]
    findings += [*_blocked(view), *_of_ingest(view)]
    if view.losses_read:
        findings += _several(
            "nan", "error", _NAN, _numbers(r for r in view.replicas if r.nonfinite)
        )
    else:
        unsaid.add("nan")
    if view.rounds is None:
        unsaid |= {"spike", "staleness", "weights_mismatch", "goodput"}
    else:
        findings += _of_rounds(view, view.rounds)
    return Verdict(findings=tuple(findings), unsaid=frozenset(unsaid))


def _finished(view: AlertView) -> Finding:
    failed = view.state == RunState.FAILED
    words = (
        f"{view.state.label.lower()}: {view.reason}" if view.reason else view.state.label.lower()
    )
    return Finding(
        kind="finished",
        level="error" if failed else "info",
        message=f"{words} ({view.committed} of {view.total} rounds)",
    )


def _live(view: AlertView) -> list[Finding]:
    if view.state not in RUN_LIVE or not view.training:
        return []
    there = sum(r.state in REPLICA_LIVE or r.state == ReplicaState.DONE for r in view.replicas)
    if there < view.quorum:
        return [
            Finding(
                kind="below_quorum", level="error",
                message=f"{there} of {view.target} replicas live, below quorum {view.quorum}",
            )
        ]  # fmt: skip
    if view.state == RunState.STALLED:
        return [Finding(kind="stalled", level="error", message=view.reason or "no round commits")]
    return []


def _lost(view: AlertView, unsaid: set[str | tuple[str, str]]) -> list[Finding]:
    """One that is on its way back is neither lost nor found."""
    on_the_way = {
        ReplicaState.RESTARTING, ReplicaState.PROVISIONING, ReplicaState.SUSPECT,
        ReplicaState.PENDING,
    }  # fmt: skip
    gone = [r for r in view.replicas if r.fell or r.state in _GONE]
    unsaid |= {
        ("replica_lost", f"replica {r.number}") for r in view.replicas if r.state in on_the_way
    }
    if len(gone) > SEVERAL:
        return _several("replica_lost", "warning", "{who} are lost", _numbers(gone))
    return [
        Finding(
            kind="replica_lost", subject=f"replica {r.number}", replica=r.number,
            level="error" if r.state == ReplicaState.FAILED else "warning",
            message=f"replica {r.number} "
            + ("failed" if r.state == ReplicaState.FAILED else "is lost")
            + (f": {r.reason}" if r.reason else ""),
        )
        for r in gone
    ]  # fmt: skip


def _budget(view: AlertView) -> list[Finding]:
    if view.budget_usd <= 0:
        return []
    share = view.cost_usd / view.budget_usd
    spent = f"${view.cost_usd:.2f} of ${view.budget_usd:.2f} is spent"
    found = []
    if share >= BUDGET_WARNS:
        found.append(Finding(kind="budget", subject="80 %", message=spent))
    if share >= 1.0:
        found.append(Finding(kind="budget", subject="100 %", level="error", message=spent))
    return found


def _blocked(view: AlertView) -> list[Finding]:
    return [
        Finding(
            kind="pool", level="error", subject=f"pool {pool.id}",
            message=f"{pool.name} is blocked until somebody acts"
            + (f": {pool.trouble}" if pool.trouble else ""),
        )
        for pool in view.pools
    ]  # fmt: skip


def _of_ingest(view: AlertView) -> list[Finding]:
    found = []
    if view.unread_since is not None:
        found.append(
            Finding(
                kind="bucket", level="error",
                message=f"progress is unknown since {view.unread_since:%Y-%m-%d %H:%M:%S} UTC: the "
                f"rendezvous cannot be read: {view.unread_because}",
            )
        )  # fmt: skip
    if view.quarantined:
        several = view.quarantined > 1
        found.append(
            Finding(
                kind="quarantined",
                message=f"{view.quarantined} record{'s' if several else ''} could not be processed "
                f"and {'are' if several else 'is'} skipped",
            )
        )
    if view.ingest_lag_s > LAG_S:
        found.append(
            Finding(
                kind="ingest_lag",
                message=f"ingest was last up to date {view.ingest_lag_s:.0f} s ago",
            )
        )
    return found


def _deadline(view: AlertView) -> list[Finding]:
    found = []
    if view.time_limit_s:
        left_s = view.time_limit_s - view.age_s
        if left_s <= _near_s(float(view.time_limit_s)):
            found.append(
                Finding(
                    kind="deadline", subject="time limit",
                    message=f"the time limit of {view.time_limit_s} s ends the run in "
                    f"{max(left_s, 0):.0f} s, after {view.committed} of {view.total} rounds",
                )
            )  # fmt: skip
    near = [
        r for r in view.replicas
        if r.left_s is not None and r.granted_s and r.left_s <= _near_s(r.granted_s)
        and r.state in REPLICA_LIVE
    ]  # fmt: skip
    if near:
        first = min(near, key=lambda r: r.left_s or 0.0)
        found.append(
            Finding(
                kind="deadline", subject="replicas", level="info",
                message=f"the backend ends {_who(_numbers(near))} soon, replica {first.number} "
                f"within {max(first.left_s or 0.0, 0):.0f} s; each is launched again",
            )
        )  # fmt: skip
    return found


def _near_s(granted_s: float) -> float:
    return min(DEADLINE_S, DEADLINE_SHARE * granted_s)


def _of_rounds(view: AlertView, rounds: RoundsView) -> list[Finding]:
    found = []
    spike = spike_of([loss for _, loss in rounds.losses])
    if spike is not None:
        number, loss = rounds.losses[-1]
        found.append(
            Finding(
                kind="spike",
                message=f"loss {loss:.4g} in round {number}, expected about {spike:.4g} as in the "
                f"rounds before",
            )
        )
    live = {r.number for r in view.replicas if r.state in REPLICA_LIVE}
    missed = (
        set.intersection(*map(set, rounds.late[-MISSES:])) if len(rounds.late) >= MISSES else ()
    )
    found += _several(
        "staleness", "warning", f"the last {MISSES} rounds were committed without {{who}}",
        sorted(live.intersection(missed)),
    )  # fmt: skip
    old = {n: by for n, by in rounds.stale.items() if n in live and by >= STALE and n not in missed}
    found += _several(
        "staleness", "warning",
        f"contributions of {{who}} began from weights {max(old.values(), default=0)} rounds old",
        sorted(old),
    )  # fmt: skip
    if rounds.mismatch:
        found.append(
            Finding(
                kind="weights_mismatch", level="error",
                message=f"replicas disagree about the weights after round {rounds.mismatch[0]}",
            )
        )  # fmt: skip
    limit = GOODPUT + (GOODPUT_MARGIN if view.low_goodput else 0.0)
    if rounds.goodput is not None and rounds.goodput < limit:
        found.append(
            Finding(
                kind="goodput",
                message=f"{rounds.goodput:.0%} of the last {RECENT} rounds' time was compute, "
                f"expected at least {GOODPUT:.0%}",
            )
        )
    return found


def spike_of(losses: Sequence[float]) -> float | None:
    """The median of the losses before the last, if the last is a spike over it; else None."""
    *before, last = losses[-SPIKE_WINDOW - 1 :] or [math.nan]
    before = [loss for loss in before if math.isfinite(loss)]
    if len(before) < SPIKE_LEAST or not math.isfinite(last):
        return None
    usual = statistics.median(before)
    change = statistics.median(abs(b - a) for a, b in itertools.pairwise(before))
    return usual if last - usual > max(SPIKE * abs(usual), SPIKE_STEPS * change) else None


_NAN = "the loss of {who} is no finite number"


def _several(kind: str, level: str, words: str, numbers: Sequence[int]) -> list[Finding]:
    """One finding each, or one for all where there are many."""
    if len(numbers) > SEVERAL:
        message = words.format(who=_who(numbers))
        return [Finding(kind=kind, level=level, subject="several", message=message)]
    return [
        Finding(
            kind=kind, level=level, subject=f"replica {n}", replica=n,
            message=words.format(who=f"replica {n}"),
        )
        for n in numbers
    ]  # fmt: skip


def _numbers(replicas: Iterable[ReplicaView]) -> list[int]:
    return [r.number for r in replicas if r.state not in _OVER]


_GONE = frozenset({ReplicaState.LOST, ReplicaState.FAILED})
_OVER = REPLICA_ENDED - _GONE


def _who(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"replica {numbers[0]}"
    named = ", ".join(map(str, numbers[:5]))
    return f"{len(numbers)} replicas ({named}{', …' if len(numbers) > 5 else ''})"
