"""Replicas that are to leave: asked through the bucket first, ended by their backend later.

A replica that is asked finishes what it has begun, gives it to a round, saves its state and goes;
one that is killed loses at most the steps since its last contribution. Both are correct; the first
is polite to the work that somebody pays for.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from diloco.store.base import Store
from executors.base import JobState
from runs.ingest.commands import send_drain
from runs.models import Replica, ReplicaAttempt
from runs.reconcile import jobs, pending, retry_policy
from runs.reconcile.context import Tick
from runs.states import REPLICA_WORKING, ReplicaState, RunState
from runs.times import has_passed, is_due
from runs.transitions import transition_replica

LEAVING = (ReplicaState.DRAINING, ReplicaState.RESTARTING, ReplicaState.EVICTED)


def leaving_ids(tick: Tick) -> set[int]:
    """Ids of replicas whose current job, if they have one, is to end."""
    return {replica.pk for replica in tick.replicas if replica.state in LEAVING}


def replicas_to_drain(tick: Tick) -> list[tuple[Replica, float]]:
    """Replicas that leave, work and have time, and how many seconds they have."""
    open_by_replica = tick.open_by_replica
    return [
        (replica, (replica.cancel_at - tick.now).total_seconds())
        for replica in tick.replicas
        if replica.state in LEAVING
        and replica.drain_sent_at is None
        and replica.worked_since is not None
        and replica.pk in open_by_replica
        and replica.cancel_at is not None
        and not is_due(replica.cancel_at, retry_policy.CANCEL_WITHIN, tick.now)
    ]


def send_drains(tick: Tick, store: Store) -> None:
    """Ask them to leave."""
    for replica, within_s in replicas_to_drain(tick):
        send_drain(replica, store, tick.now, within_s=within_s)


def release(tick: Tick) -> None:
    """The replicas of a run that is pausing: asked to leave, and to be launched again when it goes
    on. One that waits for its first launch just waits."""
    if tick.run.state != RunState.PAUSING:
        return
    time_s = retry_policy.drain_s(tick.run.round_s)
    for replica in tick.replicas:
        if replica.state not in REPLICA_WORKING | {ReplicaState.PROVISIONING, ReplicaState.SUSPECT}:
            continue
        works = replica.worked_since is not None
        tick.changes.replicas |= transition_replica(
            replica,
            ReplicaState.RESTARTING,
            reason="the run pauses",
            relaunch_at=None,
            cancel_at=tick.now + timedelta(seconds=time_s if works else 0.0),
        )


def cancel_what_must_end(tick: Tick) -> None:
    """Jobs of replicas that were given time to leave and have not, and of a run that had enough."""
    run = tick.run
    told_at = run.ended_at or run.stop_requested_at
    grace = timedelta(seconds=retry_policy.drain_s(run.round_s))
    time_is_up = told_at is not None and has_passed(told_at, grace, tick.now)
    time_is_up |= run.cancel_at is not None
    due = {
        replica.pk
        for replica in tick.replicas
        if replica.state in LEAVING
        and is_due(replica.cancel_at, retry_policy.CANCEL_WITHIN, tick.now)
    }
    jobs.cancel(a for a in tick.attempts if time_is_up or a.replica_id in due)


def hand_over(tick: Tick) -> None:
    """Whose backend or credentials will end soon leaves in good time and is launched again under
    the same identity."""
    if tick.over:
        return
    for replica in tick.replicas:
        attempt = tick.open_by_replica.get(replica.pk)
        if attempt is None or replica.state not in REPLICA_WORKING:
            continue
        ends_at, why = _end_of(attempt)
        if ends_at is None or attempt.launched_at is None:
            continue
        lifetime_s = (ends_at - attempt.launched_at).total_seconds()
        margin_s = retry_policy.hand_over_s(tick.run.round_s, lifetime_s)
        left_s = (ends_at - tick.now).total_seconds()
        if left_s > margin_s:
            continue
        tick.changes.replicas |= transition_replica(
            replica,
            ReplicaState.RESTARTING,
            reason=f"handed over: {why} in {max(left_s, 0):.0f} s",
            relaunch_at=tick.now,
            cancel_at=tick.now + timedelta(seconds=max(left_s - margin_s / 4, 0)),
        )


def _end_of(attempt: ReplicaAttempt) -> tuple[datetime | None, str]:
    """The sooner of the backend's deadline and the end of the credentials."""
    ends = [
        (at, why)
        for at, why in (
            (attempt.deadline_at, f"{attempt.replica.pool.backend} ends the job"),
            (attempt.expires_at, "the job's credentials end"),
        )
        if at is not None
    ]
    return min(ends) if ends else (None, "")


def end_hung(tick: Tick) -> None:
    """End and relaunch jobs that have waited too long for their start, and jobs that are silent for
    long although their backend says that they run."""
    if tick.over:
        return
    pending.end_pending(tick)
    limit_s = retry_policy.hung_s(float(tick.run.group_settings["heartbeat_timeout_s"]))
    for replica in tick.replicas:
        silent_s = (tick.now - replica.state_since).total_seconds()
        if replica.state != ReplicaState.SUSPECT or silent_s <= limit_s:
            continue
        if replica.pk not in tick.open_by_replica or not _may_restart(replica):
            continue
        job = tick.jobs.get(replica.pk)
        if job is not None and job.state == JobState.PENDING:
            continue  # it waits, for its queue or a machine: it is not hung
        tick.changes.replicas |= transition_replica(
            replica,
            ReplicaState.RESTARTING,
            reason=f"hung: expected a beat, found none for {silent_s:.0f} s while "
            f"{replica.pool.backend} says {replica.backend_state or 'nothing'}",
            restarts=replica.restarts + 1,
            relaunch_at=tick.now,
            cancel_at=tick.now,
        )


def _may_restart(replica: Replica) -> bool:
    return replica.restarts < replica.run.max_restarts
