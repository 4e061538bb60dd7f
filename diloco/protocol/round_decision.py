"""The decision core of a round: the observer's next action, computed from records and its clock.

Pure functions, no I/O. A replica passes its view of the round to :func:`decide` and runs the
returned action: wait, create the plan, reduce, list the shards, create the commit. Every survivor
runs the same code, so any of them can finish a round that another began (invariant I4). Creates are
atomic, so two of them can act at once.
"""

from __future__ import annotations

from dataclasses import replace

from diloco.protocol.records import Commit, Identity, Plan
from diloco.protocol.round_planning import grace_window_s, make_plan, screen
from diloco.protocol.round_view import (
    FAR,
    GATHER,
    WHOLE,
    Action,
    DecisionState,
    ListShards,
    MakeCommit,
    MakePlan,
    Merge,
    Reduce,
    RoundView,
    Totals,
    Wait,
    names,
    stagger_index,
)


def decide(
    view: RoundView, memory: DecisionState, *, now_s: float, wall_s: float, stagger_s: float
) -> tuple[Action, DecisionState]:
    """Return the observer's next action in a round without a commit, and its updated state.

    Candidates act ``stagger_s`` apart: first the contributors by replica number, then all others.
    The order only avoids needless races; correctness does not depend on it.
    """
    if view.plan is not None:
        return _decide_commit(view, view.plan, memory, now_s, wall_s, stagger_s)
    return _decide_plan(view, memory, now_s, wall_s, stagger_s)


def _decide_plan(
    view: RoundView, memory: DecisionState, now_s: float, wall_s: float, stagger_s: float
) -> tuple[Action, DecisionState]:
    accepted, refused = screen(view)
    arrived = {record.replica for record in accepted}
    settings = view.settings
    if len(accepted) < settings.min_quorum:
        missing = sorted(view.expected - arrived)
        why = f"quorum {len(accepted)}/{settings.min_quorum}"
        if missing:
            why += f", waiting for {names(missing)}"
        return Wait(FAR, why, patient=True), replace(memory, quorum_s=None, ready_s=None)
    if memory.quorum_s is None:
        memory = replace(memory, quorum_s=now_s, grace_s=grace_window_s(view, accepted))
    assert memory.quorum_s is not None
    outstanding = sorted(view.expected - view.suspected - set(view.contributions))
    closes_s = memory.quorum_s + memory.grace_s
    if outstanding and now_s < closes_s:
        return Wait(closes_s, f"waiting for {names(outstanding)}"), replace(memory, ready_s=None)
    if memory.ready_s is None:
        memory = replace(memory, ready_s=now_s)
    assert memory.ready_s is not None
    position = _position(view, [record.replica for record in accepted])
    if position is None:
        return Wait(FAR, f"waiting for replica {view.committer} to plan"), memory
    start_s = memory.ready_s + stagger_s * position
    if now_s < start_s:
        return Wait(start_s, "waiting for another replica to plan"), memory
    return MakePlan(make_plan(view, accepted, refused, wall_s=wall_s)), memory


def _decide_commit(
    view: RoundView,
    plan: Plan,
    memory: DecisionState,
    now_s: float,
    wall_s: float,
    stagger_s: float,
) -> tuple[Action, DecisionState]:
    if memory.plan_s is None:
        memory = replace(memory, plan_s=now_s)
    assert memory.plan_s is not None
    if plan.mode == GATHER and view.me.replica >= view.settings.max_replicas:
        return Wait(
            FAR, "waiting for the replicas to reduce"
        ), memory  # a syncer does not need the mean
    own_shards = [WHOLE] if plan.mode == GATHER else shards_of(plan, view.me.replica)
    missing_shards = [shard for shard in own_shards if shard not in view.merges]
    if missing_shards:
        return Reduce(plan, missing_shards[0]), memory
    position = _position(view, list(plan.owners) or [c.replica for c in plan.contributions])
    if position is None:
        return Wait(FAR, f"waiting for replica {view.committer} to commit"), memory
    start_s = memory.plan_s + stagger_s * position
    if now_s < start_s:
        return Wait(start_s, "waiting for another replica to commit"), memory
    failed = next((merge for merge in view.merges.values() if merge.failure), None)
    digests: tuple[str, ...] = ()
    if failed is None and plan.mode != GATHER:
        shard_digests = _shard_digests(view, plan, memory.plan_s, now_s)
        if not isinstance(shard_digests, tuple):
            return shard_digests, memory
        digests = shard_digests
    if view.totals is None:
        return Wait(FAR, f"waiting for the commit of round {view.round - 1}"), memory
    merge = failed or (view.merges[WHOLE] if plan.mode == GATHER else Merge())
    return MakeCommit(make_commit(view, plan, merge, digests, view.totals, wall_s)), memory


def _shard_digests(
    view: RoundView, plan: Plan, plan_s: float, now_s: float
) -> tuple[str, ...] | Action:
    """Return the digests of all shards, or the action that is needed to get them.

    The observer reduces a shard itself if its owner is dead or exceeds the heartbeat timeout, and
    if two versions of it exist; its own result counts then.
    """
    if view.reduced is None:
        return ListShards(plan)
    digests: list[str] = []
    overdue_s = plan_s + view.settings.heartbeat_timeout_s
    for shard, owner in enumerate(plan.owners):
        found = view.reduced.get(shard, ())
        if shard in view.merges:
            digests.append(view.merges[shard].digest)
        elif len(found) == 1:
            digests.append(found[0])
        elif found or owner not in view.live or now_s >= overdue_s:
            return Reduce(plan, shard)
        else:
            return Wait(overdue_s, f"waiting for shard {shard} of {names([owner])}")
    return tuple(digests)


def make_commit(
    view: RoundView,
    plan: Plan,
    merge: Merge,
    shards: tuple[str, ...],
    totals: Totals,
    wall_s: float,
) -> Commit:
    """Return the commit or void of a plan whose reduction ended as ``merge``."""
    void = bool(merge.failure)
    tokens_total = totals.tokens + (0 if void else sum(c.new_tokens for c in plan.contributions))
    committed_total = totals.committed + (0 if void else 1)
    settings = view.settings
    return Commit(
        round=view.round,
        fragment=view.fragment,
        committer=view.me,
        contributors=tuple(
            Identity(replica=c.replica, incarnation=c.incarnation) for c in plan.contributions
        ),
        merged_digest="" if void else merge.digest,
        shards=() if void else shards,
        void=merge.failure,
        void_replica=merge.failed_replica,
        tokens_total=tokens_total,
        committed_total=committed_total,
        loss=None if void else _mean_loss(plan),
        last=committed_total >= settings.total_rounds or 0 < settings.max_tokens <= tokens_total,
        wall_s=wall_s,
    )


def _mean_loss(plan: Plan) -> float:
    """Return the weighted mean of the losses. The weights sum to less than one if a replica is
    late."""
    total = sum(c.weight for c in plan.contributions)
    return sum(c.weight * c.loss for c in plan.contributions) / total


def void_unplanned(
    round: int, fragment: int, committer: Identity, *, reason: str, totals: Totals, wall_s: float
) -> Commit:
    """Return the void of a round whose plan cannot be read. It names no contributors, because only
    the plan lists them."""
    return Commit(
        round=round,
        fragment=fragment,
        committer=committer,
        contributors=(),
        void=reason,
        tokens_total=totals.tokens,
        committed_total=totals.committed,
        wall_s=wall_s,
    )


def shards_of(plan: Plan, replica: int) -> list[int]:
    """Return the shards that a replica owns, in the order in which it reduces them."""
    return [shard for shard, owner in enumerate(plan.owners) if owner == replica]


def _position(view: RoundView, candidates: list[int]) -> int | None:
    """Return the observer's position in the order of candidates; None if it must not create
    objects."""
    if view.committer is None:
        return stagger_index(view.me, candidates)
    return 0 if view.committer == view.me.replica else None
