"""Alert rules: which conditions of a run need attention. Pure functions of an ``AlertView``.

:func:`apply_rules` returns the conditions that hold now (:class:`Finding`), and those that cannot
be decided now, whose alerts remain unchanged. :mod:`runs.alerts.store` stores the alerts and sends
notifications. Nothing here changes a run.

| kind | opens when | closes when |
| --- | --- | --- |
| nan | a replica reported a loss that is NaN or infinite | its next process trains, or it ends |
| spike | the newest round's loss is :data:`SPIKE` above the median of those before | it is not |
| stalled | the quorum is live and no round is committed | a round is committed |
| below_quorum | fewer replicas live than the quorum | enough are live |
| replica_lost | a replica is lost, or has failed permanently | it trains again, or is removed |
| staleness | a live replica missed :data:`MISSES` rounds, or uses old weights | it catches up |
| weights_mismatch | weights differ between replicas after a recent round | they are equal again |
| goodput | compute is less than :data:`GOODPUT` of recent rounds | it exceeds that by a margin |
| budget | 80 or 100 % of the budget is spent | the run ends |
| shared_budget | a budget of an owner or tag is nearly spent | the period ends, or it is raised |
| deadline | the time limit or a backend deadline is near | the run ends, or the deadline moves |
| bucket | the rendezvous cannot be read | it can be read |
| pool | a backend account needs an operator: credential, quota or billing | an operator acts |
| quarantined | records were quarantined | the run ends |
| ingest_lag | ingest is more than :data:`LAG_S` late | it is up to date |
| finished | the run ends; opened and closed at once | |
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runs.alerts.alert_view import AlertView, IngestView, ReplicaView, RoundsView
from runs.states import REPLICA_ENDED, REPLICA_LIVE, RUN_ENDED, RUN_LIVE, ReplicaState, RunState

KINDS = {
    "nan": "Loss is NaN",
    "spike": "Loss spike",
    "stalled": "Stalled",
    "below_quorum": "Below quorum",
    "replica_lost": "Replica lost",
    "staleness": "Staleness",
    "weights_mismatch": "Weights differ",
    "goodput": "Goodput is low",
    "budget": "Budget",
    "shared_budget": "Shared budget",
    "deadline": "Deadline near",
    "bucket": "Bucket unreachable",
    "pool": "Pool blocked",
    "quarantined": "Records quarantined",
    "ingest_lag": "Ingest is late",
    "finished": "Finished",
}
"""Kind -> title."""

SPIKE = 0.2
"""A spike exceeds the median of the previous rounds by this share of it,"""
SPIKE_STEPS = 6.0
"""and by this many times the median change from round to round, so that noise is no spike."""
SPIKE_WINDOW = 8
SPIKE_LEAST = 4
"""Previous rounds that are needed to detect a spike."""
RECENT = 5
"""Number of rounds whose time, lateness and digests are checked."""
MISSES = 3
STALE = 3
"""Rounds by which the weights of a contribution are older than the newest when they are stale."""
GOODPUT = 0.5
GOODPUT_MARGIN = 0.05
BUDGET_WARNS = 0.8
DEADLINE_S = 600.0
DEADLINE_SHARE = 0.1
"""A deadline is near if less than this share of the time remains, and at most DEADLINE_S."""
LAG_S = 60.0
"""Ingest is late this many seconds after it was last up to date."""
SEVERAL = 8
"""More replicas than this with the same condition share one alert."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A condition that holds now.

    ``subject`` distinguishes the alerts of one kind. ``limit`` is the part of the message that an
    operator can change: an open alert without it gets the new message.
    """

    kind: str
    message: str
    level: str = "warning"
    subject: str = ""
    replica: int | None = None
    limit: str = ""


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """The result of all rules."""

    findings: tuple[Finding, ...] = ()
    undecided: frozenset[str | tuple[str, str]] = frozenset()
    """Kinds, or (kind, subject), that cannot be decided now."""

    def is_undecided(self, kind: str, subject: str) -> bool:
        """Whether an open alert without a finding stays open."""
        return kind in self.undecided or (kind, subject) in self.undecided


def apply_rules(view: AlertView) -> RuleResult:
    """Evaluate all rules."""
    if view.state in RUN_ENDED:
        return RuleResult(findings=(_finished(view),))
    undecided: set[str | tuple[str, str]] = set()
    findings = [*_live(view), *_lost(view, undecided), *_budget(view), *_deadline(view)]
    findings += [*_blocked(view), *_ingest(view.ingest)]
    if view.losses_read:
        findings += _several(
            "nan", "error", _NAN, _numbers(r for r in view.replicas if r.nonfinite)
        )
    else:
        undecided.add("nan")
    if view.rounds is None:
        undecided |= {"spike", "staleness", "weights_mismatch", "goodput"}
    else:
        findings += _rounds(view, view.rounds)
    return RuleResult(findings=tuple(findings), undecided=frozenset(undecided))


def _finished(view: AlertView) -> Finding:
    failed = view.state == RunState.FAILED
    outcome = view.state.label.lower()
    if view.reason:
        outcome += f": {view.reason}"
    return Finding(
        kind="finished",
        level="error" if failed else "info",
        message=f"{outcome} ({view.committed} of {view.total} rounds)",
    )


def _live(view: AlertView) -> list[Finding]:
    if view.state not in RUN_LIVE or not view.training:
        return []
    live = sum(r.state in REPLICA_LIVE or r.state == ReplicaState.DONE for r in view.replicas)
    if live < view.quorum:
        return [
            Finding(
                kind="below_quorum",
                level="error",
                message=f"{live} of {view.target} replicas live, below quorum {view.quorum}",
            )
        ]
    if view.state == RunState.STALLED:
        return [Finding(kind="stalled", level="error", message=view.reason or "no round commits")]
    return []


def _lost(view: AlertView, undecided: set[str | tuple[str, str]]) -> list[Finding]:
    """Lost and failed replicas. A replica that is being relaunched is undecided."""
    undecided |= {
        ("replica_lost", f"replica {r.number}") for r in view.replicas if r.state in _STARTING
    }
    lost = [r for r in view.replicas if r.fell or r.state in _LOST]
    if len(lost) > SEVERAL:
        return _several("replica_lost", "warning", "{subject} are lost", _numbers(lost))
    return [
        Finding(
            kind="replica_lost",
            subject=f"replica {r.number}",
            replica=r.number,
            level="error" if r.state == ReplicaState.FAILED else "warning",
            message=f"replica {r.number} "
            + ("failed" if r.state == ReplicaState.FAILED else "is lost")
            + (f": {r.reason}" if r.reason else ""),
        )
        for r in lost
    ]


def _budget(view: AlertView) -> list[Finding]:
    if view.budget_usd <= 0:
        return []
    share = view.cost_usd / view.budget_usd
    limit = f" of ${view.budget_usd:.2f} is spent"
    spent = f"${view.cost_usd:.2f}{limit}"
    levels = (("80 %", "warning", BUDGET_WARNS), ("100 %", "error", 1.0))
    return [
        Finding(kind="budget", subject=subject, level=level, message=spent, limit=limit)
        for subject, level, least in levels
        if share >= least
    ]


def _blocked(view: AlertView) -> list[Finding]:
    return [
        Finding(
            kind="pool",
            level="error",
            subject=f"pool {pool.id}",
            message=f"{pool.name} is blocked, action required"
            + (f": {pool.last_error}" if pool.last_error else ""),
        )
        for pool in view.pools
    ]


def _ingest(view: IngestView) -> list[Finding]:
    findings = []
    if view.unread_since is not None:
        findings.append(
            Finding(
                kind="bucket",
                level="error",
                message=f"progress is unknown since {view.unread_since:%Y-%m-%d %H:%M:%S} UTC: the "
                f"rendezvous cannot be read: {view.unread_because}",
            )
        )
    if view.quarantined:
        several = view.quarantined > 1
        findings.append(
            Finding(
                kind="quarantined",
                message=f"{view.quarantined} record{'s' if several else ''} could not be processed "
                f"and {'are' if several else 'is'} skipped",
            )
        )
    if view.lag_s > LAG_S:
        findings.append(
            Finding(
                kind="ingest_lag",
                message=f"ingest was last up to date {view.lag_s:.0f} s ago",
            )
        )
    return findings


def _deadline(view: AlertView) -> list[Finding]:
    findings = []
    if view.time_limit_s:
        left_s = view.time_limit_s - view.age_s
        if left_s <= _near_s(float(view.time_limit_s)):
            findings.append(
                Finding(
                    kind="deadline",
                    subject="time limit",
                    message=f"the time limit of {view.time_limit_s} s ends the run in "
                    f"{max(left_s, 0):.0f} s, after {view.committed} of {view.total} rounds",
                )
            )
    near = [r for r in view.replicas if r.state in REPLICA_LIVE and _is_near(r)]
    if near:
        first = min(near, key=lambda r: r.left_s or 0.0)
        findings.append(
            Finding(
                kind="deadline",
                subject="replicas",
                level="info",
                message=f"the backend ends {_subject(_numbers(near))} soon, replica {first.number} "
                f"within {max(first.left_s or 0.0, 0):.0f} s; each is launched again",
            )
        )
    return findings


def _is_near(replica: ReplicaView) -> bool:
    left_s, granted_s = replica.left_s, replica.granted_s
    return left_s is not None and bool(granted_s) and left_s <= _near_s(granted_s or 0.0)


def _near_s(granted_s: float) -> float:
    return min(DEADLINE_S, DEADLINE_SHARE * granted_s)


def _rounds(view: AlertView, rounds: RoundsView) -> list[Finding]:
    findings = []
    spike = spike_of([loss for _, loss in rounds.losses])
    if spike is not None:
        number, loss = rounds.losses[-1]
        findings.append(
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
    late = f"the last {MISSES} rounds were committed without {{subject}}"
    findings += _several("staleness", "warning", late, sorted(live.intersection(missed)))
    old = {n: by for n, by in rounds.stale.items() if n in live and by >= STALE and n not in missed}
    age = max(old.values(), default=0)
    stale = f"contributions of {{subject}} began from weights {age} rounds old"
    findings += _several("staleness", "warning", stale, sorted(old))
    if rounds.mismatch:
        findings.append(
            Finding(
                kind="weights_mismatch",
                level="error",
                message=f"replicas disagree about the weights after round {rounds.mismatch[0]}",
            )
        )
    limit = GOODPUT + (GOODPUT_MARGIN if view.low_goodput else 0.0)
    if rounds.goodput is not None and rounds.goodput < limit:
        findings.append(
            Finding(
                kind="goodput",
                message=f"{rounds.goodput:.0%} of the last {RECENT} rounds' time was compute, "
                f"expected at least {GOODPUT:.0%}",
            )
        )
    return findings


def spike_of(losses: Sequence[float]) -> float | None:
    """The median of the previous losses if the last loss is a spike, otherwise None."""
    *before, last = losses[-SPIKE_WINDOW - 1 :] or [math.nan]
    before = [loss for loss in before if math.isfinite(loss)]
    if len(before) < SPIKE_LEAST or not math.isfinite(last):
        return None
    usual = statistics.median(before)
    change = statistics.median(abs(b - a) for a, b in itertools.pairwise(before))
    return usual if last - usual > max(SPIKE * abs(usual), SPIKE_STEPS * change) else None


_NAN = "the loss of {subject} is NaN or infinite"


def _several(kind: str, level: str, template: str, numbers: Sequence[int]) -> list[Finding]:
    """One finding per replica, or one for all if there are many."""
    if len(numbers) > SEVERAL:
        message = template.format(subject=_subject(numbers))
        return [Finding(kind=kind, level=level, subject="several", message=message)]
    return [
        Finding(
            kind=kind,
            level=level,
            subject=f"replica {n}",
            replica=n,
            message=template.format(subject=f"replica {n}"),
        )
        for n in numbers
    ]


def _numbers(replicas: Iterable[ReplicaView]) -> list[int]:
    return [r.number for r in replicas if r.state not in _OVER]


_STARTING = frozenset(
    {
        ReplicaState.RESTARTING,
        ReplicaState.PROVISIONING,
        ReplicaState.SUSPECT,
        ReplicaState.PENDING,
    }
)
_LOST = frozenset({ReplicaState.LOST, ReplicaState.FAILED})
_OVER = REPLICA_ENDED - _LOST


def _subject(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"replica {numbers[0]}"
    named = ", ".join(map(str, numbers[:5]))
    return f"{len(numbers)} replicas ({named}{', …' if len(numbers) > 5 else ''})"
