"""The decision core of a round: what to do next, from records and the observer's clock alone.

Pure functions, no I/O. A replica feeds :func:`decide` with what it has seen so far and does what
it says: wait, create the plan, reduce, look around, create the commit. Every survivor runs the same
code, so any of them can finish a round that another began (invariant I4); creates are atomic, so it
does not matter when two of them act at once.
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
    Look,
    MakeCommit,
    MakePlan,
    Memory,
    Merge,
    Reduce,
    RoundView,
    Totals,
    Wait,
    names,
    turn,
)


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


def _decide_plan(
    view: RoundView, memory: Memory, now_s: float, wall_s: float, stagger_s: float
) -> tuple[Action, Memory]:
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
    waited_for = sorted(view.expected - set(view.contributions))
    closes_s = memory.quorum_s + memory.grace_s
    if waited_for and now_s < closes_s:
        return Wait(closes_s, f"waiting for {names(waited_for)}"), replace(memory, ready_s=None)
    if memory.ready_s is None:
        memory = replace(memory, ready_s=now_s)
    assert memory.ready_s is not None
    place = _place(view, [record.replica for record in accepted])
    if place is None:
        return Wait(FAR, f"replica {view.committer} is to plan"), memory
    turn_s = memory.ready_s + stagger_s * place
    if now_s < turn_s:
        return Wait(turn_s, "another replica's turn to plan"), memory
    return MakePlan(make_plan(view, accepted, refused, wall_s=wall_s)), memory


def _decide_commit(
    view: RoundView, plan: Plan, memory: Memory, now_s: float, wall_s: float, stagger_s: float
) -> tuple[Action, Memory]:
    if memory.plan_s is None:
        memory = replace(memory, plan_s=now_s)
    assert memory.plan_s is not None
    if plan.mode == GATHER and view.me.replica >= view.settings.max_replicas:
        return Wait(FAR, "the replicas to gather"), memory  # a syncer has no use for the mean
    mine = [WHOLE] if plan.mode == GATHER else _shards_of(plan, view.me.replica)
    undone = [shard for shard in mine if shard not in view.merges]
    if undone:
        return Reduce(plan, undone[0]), memory
    place = _place(view, list(plan.owners) or [c.replica for c in plan.contributions])
    if place is None:
        return Wait(FAR, f"replica {view.committer} is to commit"), memory
    turn_s = memory.plan_s + stagger_s * place
    if now_s < turn_s:
        return Wait(turn_s, "another replica's turn to commit"), memory
    failed = next((merge for merge in view.merges.values() if merge.failure), None)
    digests: tuple[str, ...] = ()
    if failed is None and plan.mode != GATHER:
        found = _shard_digests(view, plan, memory.plan_s, now_s)
        if not isinstance(found, tuple):
            return found, memory
        digests = found
    if view.totals is None:
        return Wait(FAR, f"the commit of round {view.round - 1}"), memory
    merge = failed or (view.merges[WHOLE] if plan.mode == GATHER else Merge())
    return MakeCommit(make_commit(view, plan, merge, digests, view.totals, wall_s)), memory


def _shard_digests(
    view: RoundView, plan: Plan, plan_s: float, now_s: float
) -> tuple[str, ...] | Action:
    """The digests of all shards, or what to do to get them.

    A shard whose owner is dead, or has not delivered within the heartbeat timeout, is reduced by
    the observer; so is one of which two versions lie there, and then its own word counts.
    """
    if view.reduced is None:
        return Look(plan)
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
    """The commit, or the void, that follows from a plan and how its reduction went."""
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
        loss=None if void else sum(c.weight * c.loss for c in plan.contributions),
        last=committed_total >= settings.total_rounds or 0 < settings.max_tokens <= tokens_total,
        wall_s=wall_s,
    )


def void_unplanned(
    round: int, fragment: int, committer: Identity, *, reason: str, totals: Totals, wall_s: float
) -> Commit:
    """The void of a round whose plan cannot be read. It names no contributors, as only the plan
    lists them."""
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


def _shards_of(plan: Plan, replica: int) -> list[int]:
    return [shard for shard, owner in enumerate(plan.owners) if owner == replica]


def _place(view: RoundView, candidates: list[int]) -> int | None:
    """The observer's turn; None if it may not create at all."""
    if view.committer is None:
        return turn(view.me, candidates)
    return 0 if view.committer == view.me.replica else None
