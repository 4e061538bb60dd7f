"""Draining replicas: request it through the bucket first, end the job through its backend later.

A drained replica finishes its local steps, contributes them, saves its state and exits. A killed
one loses at most the steps since its last contribution. Both are correct; draining wastes less
compute.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from diloco.store.base import Store
from executors.base import JobState
from runs.ingest.commands import send_drain
from runs.models import Replica, ReplicaAttempt
from runs.reconcile import jobs, pending, retry_policy
from runs.reconcile.context import ReconcileContext
from runs.states import REPLICA_WORKING, ReplicaState, RunState
from runs.times import has_passed, is_due
from runs.transitions import transition_replica

LEAVING = (ReplicaState.DRAINING, ReplicaState.RESTARTING, ReplicaState.EVICTED)


def leaving_ids(context: ReconcileContext) -> set[int]:
    """Ids of replicas whose current job, if any, should end."""
    return {replica.pk for replica in context.replicas if replica.state in LEAVING}


def replicas_to_drain(context: ReconcileContext) -> list[tuple[Replica, float]]:
    """Draining replicas that work and have time left, with the number of seconds left."""
    open_by_replica = context.open_by_replica
    return [
        (replica, (replica.cancel_at - context.now).total_seconds())
        for replica in context.replicas
        if replica.state in LEAVING
        and replica.drain_sent_at is None
        and replica.worked_since is not None
        and replica.pk in open_by_replica
        and replica.cancel_at is not None
        and not is_due(replica.cancel_at, retry_policy.CANCEL_WITHIN, context.now)
    ]


def send_drains(context: ReconcileContext, store: Store) -> None:
    """Send the drain commands."""
    for replica, within_s in replicas_to_drain(context):
        send_drain(replica, store, context.now, within_s=within_s)


def release(context: ReconcileContext) -> None:
    """Drain the replicas of a run that is pausing; they relaunch when it resumes. A replica that
    waits for its first launch keeps waiting."""
    if context.run.state != RunState.PAUSING:
        return
    time_s = retry_policy.drain_s(context.run.round_s)
    for replica in context.replicas:
        if replica.state not in REPLICA_WORKING | {ReplicaState.PROVISIONING, ReplicaState.SUSPECT}:
            continue
        is_working = replica.worked_since is not None
        context.changes.replicas |= transition_replica(
            replica,
            ReplicaState.RESTARTING,
            reason="the run pauses",
            relaunch_at=None,
            cancel_at=context.now + timedelta(seconds=time_s if is_working else 0.0),
        )


def cancel_overdue(context: ReconcileContext) -> None:
    """Cancel jobs whose time to drain is over, and all jobs of a run whose grace time is over."""
    run = context.run
    ending_since = run.ended_at or run.stop_requested_at
    grace = timedelta(seconds=retry_policy.drain_s(run.round_s))
    time_is_up = ending_since is not None and has_passed(ending_since, grace, context.now)
    time_is_up |= run.cancel_at is not None
    due = {
        replica.pk
        for replica in context.replicas
        if replica.state in LEAVING
        and is_due(replica.cancel_at, retry_policy.CANCEL_WITHIN, context.now)
    }
    jobs.cancel(a for a in context.attempts if time_is_up or a.replica_id in due)


def replace_expiring(context: ReconcileContext) -> None:
    """Drain replicas whose backend deadline or credentials end soon, and relaunch them under the
    same identity."""
    if context.over:
        return
    for replica in context.replicas:
        attempt = context.open_by_replica.get(replica.pk)
        if attempt is None or replica.state not in REPLICA_WORKING:
            continue
        ends_at, why = _end_of(attempt)
        if ends_at is None or attempt.launched_at is None:
            continue
        lifetime_s = (ends_at - attempt.launched_at).total_seconds()
        margin_s = retry_policy.replace_s(context.run.round_s, lifetime_s)
        left_s = (ends_at - context.now).total_seconds()
        if left_s > margin_s:
            continue
        context.changes.replicas |= transition_replica(
            replica,
            ReplicaState.RESTARTING,
            reason=f"handed over: {why} in {max(left_s, 0):.0f} s",
            relaunch_at=context.now,
            cancel_at=context.now + timedelta(seconds=max(left_s - margin_s / 4, 0)),
        )


def _end_of(attempt: ReplicaAttempt) -> tuple[datetime | None, str]:
    """The earlier of the backend's deadline and the expiry of the credentials, with a reason."""
    ends = [
        (at, why)
        for at, why in (
            (attempt.deadline_at, f"{attempt.replica.pool.backend} ends the job"),
            (attempt.expires_at, "the job's credentials expire"),
        )
        if at is not None
    ]
    return min(ends) if ends else (None, "")


def end_hung(context: ReconcileContext) -> None:
    """Relaunch jobs that waited too long for their start, and jobs without heartbeats that their
    backend reports as running."""
    if context.over:
        return
    pending.end_pending(context)
    limit_s = retry_policy.hung_s(context.run.settings.heartbeat_timeout_s)
    for replica in context.replicas:
        silent_s = (context.now - replica.state_since).total_seconds()
        if replica.state != ReplicaState.SUSPECT or silent_s <= limit_s:
            continue
        if replica.pk not in context.open_by_replica or not _may_restart(replica):
            continue
        job = context.jobs.get(replica.pk)
        if job is not None and job.state == JobState.PENDING:
            continue  # it waits for a queue or a machine, so it is not hung
        context.changes.replicas |= transition_replica(
            replica,
            ReplicaState.RESTARTING,
            reason=f"hung: expected a heartbeat, found none for {silent_s:.0f} s while "
            f"{replica.pool.backend} reports {replica.backend_state or 'nothing'}",
            restarts=replica.restarts + 1,
            relaunch_at=context.now,
            cancel_at=context.now,
        )


def _may_restart(replica: Replica) -> bool:
    return replica.restarts < replica.run.max_restarts
