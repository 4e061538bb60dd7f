"""The decision core of a round: what to do next, from records and the observer's clock alone.

Pure functions, no I/O. A replica feeds :func:`decide` with what it has seen so far and does what
it says: wait, create the plan, reduce, create the commit. Every survivor runs the same code, so any
of them can finish a round that another began (invariant I4); creates are atomic, so it does not
matter when two of them act at once.

Times are seconds on the observer's own monotonic clock (invariant I5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from diloco.rendezvous.records import (
    Commit,
    ContributionRecord,
    Identity,
    Plan,
    PlannedContribution,
    Refusal,
)
from diloco.rendezvous.settings import GroupSettings

GATHER = "gather"


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Cumulative counts up to the newest commit the observer has applied."""

    committed: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Merge:
    """How the observer's own reduction of the plan went: a digest, or why it failed."""

    digest: str = ""
    failure: str = ""
    failed_replica: int | None = None


@dataclass(frozen=True, kw_only=True)
class RoundView:
    """What one observer has seen of round ``round``.

    ``contributions`` holds the highest incarnation's record of each replica. ``expected`` are the
    replicas believed alive and working towards this round. ``base_round``, ``base_digest`` and
    ``model_hash`` are what the observer itself stands on.
    """

    round: int
    fragment: int
    me: Identity
    settings: GroupSettings
    model_hash: str
    numel: int
    base_round: int
    base_digest: str
    totals: Totals
    contributions: Mapping[int, ContributionRecord]
    expected: frozenset[int]
    plan: Plan | None = None
    merge: Merge | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """When the observer first saw each stage. Starts empty in every round."""

    quorum_s: float | None = None
    ready_s: float | None = None
    plan_s: float | None = None


@dataclass(frozen=True)
class Wait:
    """Nothing to do before ``until_s`` unless something new is seen; ``why`` is for people."""

    until_s: float
    why: str


@dataclass(frozen=True)
class MakePlan:
    plan: Plan


@dataclass(frozen=True)
class Reduce:
    """Read and verify every payload of the plan, then decide again with ``merge`` set."""

    plan: Plan


@dataclass(frozen=True)
class MakeCommit:
    commit: Commit


Action = Wait | MakePlan | Reduce | MakeCommit

FAR = float("inf")


def decide(
    view: RoundView, memory: Memory, *, now_s: float, wall_s: float, stagger_s: float
) -> tuple[Action, Memory]:
    """The observer's next action in a round that has no commit yet, and what to remember.

    Candidates take turns, ``stagger_s`` apart: contributors by replica number, then everybody
    else. The turn only avoids needless races; correctness does not depend on it.
    """
    if view.plan is not None:
        return _decide_commit(view, view.plan, memory, now_s, wall_s, stagger_s)
    return _decide_plan(view, memory, now_s, wall_s, stagger_s)


def screen(view: RoundView) -> tuple[list[ContributionRecord], list[Refusal]]:
    """Sort contributions into those that may be averaged, by replica, and those that may not.

    A contribution without tokens is neither: it counts for nothing.
    """
    digests = Counter(
        c.base_digest for c in view.contributions.values() if c.base_round == view.base_round
    )
    # The majority's weights are right; in a draw the observer trusts its own.
    agreed = max(digests, key=lambda d: (digests[d], d == view.base_digest), default="")
    accepted: list[ContributionRecord] = []
    refused: list[Refusal] = []
    for replica in sorted(view.contributions):
        record = view.contributions[replica]
        reason = _refusal(view, record, agreed)
        if reason:
            refused.append(Refusal(replica=replica, incarnation=record.incarnation, reason=reason))
        elif record.tokens > 0 and record.steps > 0:
            accepted.append(record)
    return accepted, refused


def _refusal(view: RoundView, record: ContributionRecord, agreed_digest: str) -> str:
    for what, expected, found in (
        ("model", view.model_hash, record.model_hash),
        ("round", view.round, record.round),
        ("fragment", view.fragment, record.fragment),
        ("codec", view.settings.codec, record.codec),
        ("number of elements", view.numel, record.numel),
        ("base round", view.base_round, record.base_round),
        ("digest of the base weights", agreed_digest, record.base_digest),
    ):
        if expected != found:
            return f"expected {what} {expected}, found {found}"
    if not _finite(record.norm) or not _finite(record.loss):
        return f"expected a finite pseudo-gradient, found norm {record.norm} and loss {record.loss}"
    return ""


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")


def weight_of(record: ContributionRecord, weighting: str) -> float:
    """The weight of a contribution, before they are normalised to sum to one.

    ``tokens``: tokens * tokens / steps (Decoupled DiLoCo, arXiv:2604.21428).
    """
    if weighting == "tokens":
        return record.tokens * record.tokens / record.steps
    return 1.0


def _decide_plan(
    view: RoundView, memory: Memory, now_s: float, wall_s: float, stagger_s: float
) -> tuple[Action, Memory]:
    accepted, refused = screen(view)
    arrived = {record.replica for record in accepted}
    quorum = view.settings.min_quorum
    if len(accepted) < quorum:
        missing = sorted(view.expected - arrived)
        why = f"quorum {len(accepted)}/{quorum}"
        if missing:
            why += f", waiting for {_names(missing)}"
        return Wait(FAR, why), replace(memory, quorum_s=None, ready_s=None)
    if memory.quorum_s is None:
        memory = replace(memory, quorum_s=now_s)
    assert memory.quorum_s is not None
    waited_for = sorted(view.expected - set(view.contributions))
    closes_s = memory.quorum_s + view.settings.grace_s
    if waited_for and now_s < closes_s:
        return Wait(closes_s, f"waiting for {_names(waited_for)}"), replace(memory, ready_s=None)
    if memory.ready_s is None:
        memory = replace(memory, ready_s=now_s)
    assert memory.ready_s is not None
    turn_s = memory.ready_s + stagger_s * _turn(view.me, [record.replica for record in accepted])
    if now_s < turn_s:
        return Wait(turn_s, "another replica's turn to plan"), memory
    weights = [weight_of(record, view.settings.weighting) for record in accepted]
    plan = Plan(
        round=view.round,
        fragment=view.fragment,
        mode=GATHER,
        planner=view.me,
        contributions=tuple(
            PlannedContribution(
                replica=record.replica,
                incarnation=record.incarnation,
                weight=weight / sum(weights),
                tokens=record.tokens,
                steps=record.steps,
                loss=record.loss,
                size_bytes=record.size_bytes,
                digest=record.digest,
            )
            for record, weight in zip(accepted, weights, strict=True)
        ),
        refused=tuple(refused),
        wall_s=wall_s,
    )
    return MakePlan(plan), memory


def _decide_commit(
    view: RoundView, plan: Plan, memory: Memory, now_s: float, wall_s: float, stagger_s: float
) -> tuple[Action, Memory]:
    if memory.plan_s is None:
        memory = replace(memory, plan_s=now_s)
    assert memory.plan_s is not None
    if view.merge is None:
        return Reduce(plan), memory
    turn_s = memory.plan_s + stagger_s * _turn(view.me, [c.replica for c in plan.contributions])
    if now_s < turn_s:
        return Wait(turn_s, "another replica's turn to commit"), memory
    return MakeCommit(make_commit(view, plan, view.merge, wall_s=wall_s)), memory


def make_commit(view: RoundView, plan: Plan, merge: Merge, *, wall_s: float) -> Commit:
    """The commit, or the void, that follows from a plan and how its reduction went."""
    void = bool(merge.failure)
    tokens = 0 if void else sum(c.tokens for c in plan.contributions)
    committed_total = view.totals.committed + (0 if void else 1)
    tokens_total = view.totals.tokens + tokens
    settings = view.settings
    return Commit(
        round=view.round,
        fragment=view.fragment,
        committer=view.me,
        contributors=tuple(
            Identity(replica=c.replica, incarnation=c.incarnation) for c in plan.contributions
        ),
        merged_digest="" if void else merge.digest,
        void=merge.failure,
        void_replica=merge.failed_replica,
        tokens_total=tokens_total,
        committed_total=committed_total,
        loss=None if void else sum(c.weight * c.loss for c in plan.contributions),
        last=committed_total >= settings.total_rounds or 0 < settings.max_tokens <= tokens_total,
        wall_s=wall_s,
    )


def _turn(me: Identity, candidates: list[int]) -> int:
    return candidates.index(me.replica) if me.replica in candidates else len(candidates)


def _names(replicas: list[int]) -> str:
    return ("replica " if len(replicas) == 1 else "replicas ") + ", ".join(map(str, replicas))
