"""Updates replicas within a tick: their states, and which of them relaunch."""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q

from runs.backends import circuit_breaker, prices
from runs.bulk import update_row
from runs.models import Replica, ReplicaAttempt
from runs.reconcile import decisions, jobs, retry_policy
from runs.reconcile.context import LOST_TASK_AFTER, ReconcileContext, beat_id
from runs.reconcile.decisions import ReplicaView
from runs.reconcile.draining import leaving_ids
from runs.states import (
    REPLICA_TRANSITIONS,
    REPLICA_WORKING,
    RUN_LIVE,
    ReplicaState,
    RunState,
)
from runs.task_queue import enqueue
from runs.times import has_passed, is_due
from runs.transitions import transition_replica


def update_replicas(context: ReconcileContext) -> None:
    timeout_s = context.run.settings.heartbeat_timeout_s
    for replica in context.replicas:
        view = ReplicaView(
            state=ReplicaState(replica.state),
            job=context.jobs.get(replica.pk),
            beat=context.beats.get(replica.number),
            heartbeat_timeout_s=timeout_s,
            run_is_over=context.over,
            bucket_was_read=context.bucket_was_read,
            bucket_was_given_up=context.bucket_was_given_up,
        )
        _update(context, replica, view)
        if view.beat is not None and view.beat.changed:
            update_row(replica, beat_judged=beat_id(replica))  # it changes the replica only once


def _update(context: ReconcileContext, replica: Replica, view: ReplicaView) -> None:
    decision = decisions.decide_replica(view)
    if decision is None or decision.to not in REPLICA_TRANSITIONS[view.state]:
        return
    starts_working = decision.to in REPLICA_WORKING and replica.worked_since is None
    since, fell_at = replica.worked_since, replica.fell_at
    if starts_working:
        since, fell_at = context.now, None
    if not transition_replica(
        replica, decision.to, reason=decision.reason, worked_since=since, fell_at=fell_at
    ):
        return
    context.changes.replicas = True
    if starts_working:
        jobs.mark_started(context.open_by_replica.get(replica.pk))
        circuit_breaker.count_success(replica.pool)
    elif view.state == ReplicaState.PROVISIONING and decision.to in _FAILED_STATES:
        circuit_breaker.count_failure(replica.pool, f"{replica}: {decision.reason}")


_FAILED_STATES = (ReplicaState.FAILED, ReplicaState.LOST)


def relaunch(context: ReconcileContext) -> None:
    """Schedule relaunches by policy, and enqueue every launch that is due."""
    if context.over or context.run.state not in RUN_LIVE | {RunState.PROVISIONING}:
        return
    open_by_replica = context.open_by_replica
    for pool in {r.pool_id: r.pool for r in context.replicas if r.pool.held}.values():
        # Also for pools in which no replica waits any more.
        prices.can_launch(pool, budget=context.budget_refusal)
    due: set[int] = set()
    for replica in context.replicas:
        delay_s = relaunch_delay_s(replica)
        if delay_s is not None:
            _schedule(context, replica, delay_s)
        attempt = open_by_replica.get(replica.pk)
        if _launch_is_due(context, replica, attempt):
            due.add(replica.pool_id)
    for pool_id in sorted(due):
        enqueue("launch_pool", pool_id, expires=LOST_TASK_AFTER.total_seconds())


def _schedule(context: ReconcileContext, replica: Replica, delay_s: float) -> None:
    last = _last_attempt(replica)
    cause = last.cause if last else ""
    restarts = retry_policy.restarts_after(
        replica.restarts, cause=cause, worked_s=_worked_s(replica)
    )
    count = f"restart {restarts} of {context.run.max_restarts}"
    if cause in retry_policy.EXCUSED_CAUSES:
        count = "restart, not counted,"
    context.changes.replicas |= transition_replica(
        replica,
        ReplicaState.RESTARTING,
        reason=f"{count} in {delay_s:g} s, after: {replica.state_reason}",
        restarts=restarts,
        relaunch_at=context.now + timedelta(seconds=delay_s),
        fell_at=context.now,
    )


def relaunch_delay_s(replica: Replica) -> float | None:
    last = _last_attempt(replica) if replica.ended else None
    return retry_policy.relaunch_delay_s(
        ReplicaState(replica.state),
        restarts=retry_policy.counted_failures(replica.restarts, worked_s=_worked_s(replica)),
        cause=last.cause if last else "",
        exit_code=last.exit_code if last else None,
        max_restarts=replica.run.max_restarts,
    )


def _worked_s(replica: Replica) -> float:
    """Seconds that an ended attempt worked, from its first working heartbeat to its end."""
    if replica.worked_since is None:
        return 0.0
    return (replica.state_since - replica.worked_since).total_seconds()


def _last_attempt(replica: Replica) -> ReplicaAttempt | None:
    return replica.attempts.order_by("-number").first()


def _launch_is_due(
    context: ReconcileContext, replica: Replica, attempt: ReplicaAttempt | None
) -> bool:
    now = context.now
    waited = has_passed(replica.state_since, LOST_TASK_AFTER, now)
    if replica.state == ReplicaState.PROVISIONING:
        begun = attempt is not None and not attempt.is_complete
        return waited and begun and not circuit_breaker.is_open(replica.pool, now)
    if not circuit_breaker.can_launch(replica.pool, now):
        return False
    if replica.state == ReplicaState.RESTARTING:
        due = attempt is None and is_due(replica.relaunch_at, retry_policy.RELAUNCH_WITHIN, now)
    else:
        due = waited and replica.state == ReplicaState.PENDING
    return due and _is_affordable(context, replica)


def _is_affordable(context: ReconcileContext, replica: Replica) -> bool:
    """Check price and budgets. A held replica shows the reason until its launch."""
    if prices.can_launch(replica.pool, budget=context.budget_refusal):
        return True
    message = f"not launched: {replica.pool.held}"
    if replica.state_reason != message:
        context.changes.replicas |= update_row(
            replica, Q(state=replica.state), state_reason=message
        )
    return False


def cancel_unwanted_launches(context: ReconcileContext) -> None:
    """Cancel launches that have begun, have no job, and are no longer wanted."""
    leaving = leaving_ids(context)
    context.jobs |= jobs.close_unlaunched(
        (
            attempt
            for attempt in context.attempts
            # A replica in jobs has a job, or its backend could not be polled.
            if attempt.replica_id not in context.jobs
            and (context.over or attempt.replica_id in leaving)
        ),
        now=context.now,
    )


def give_up_on_unreachable_backends(context: ReconcileContext) -> None:
    """Give up on unreachable backends of a run that was stopped, or ended, long ago."""
    ending_since = context.run.ended_at or context.run.stop_requested_at
    if ending_since is not None and has_passed(ending_since, jobs.GIVE_UP_AFTER, context.now):
        context.jobs |= jobs.give_up(context.attempts, context.jobs, now=context.now)
