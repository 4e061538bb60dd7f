"""Replicas within a tick: what became of them, and who is launched again."""

from __future__ import annotations

from datetime import timedelta

from runs.backends import circuit_breaker, prices
from runs.models import Replica, ReplicaAttempt
from runs.reconcile import decisions, jobs, retry_policy
from runs.reconcile.context import LOST_TASK_AFTER, Tick, beat_name
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


def judge_replicas(tick: Tick) -> None:
    timeout_s = float(tick.run.group_settings["heartbeat_timeout_s"])
    for replica in tick.replicas:
        view = ReplicaView(
            state=ReplicaState(replica.state),
            job=tick.jobs.get(replica.pk),
            beat=tick.beats.get(replica.number),
            heartbeat_timeout_s=timeout_s,
            run_is_over=tick.over,
            bucket_was_read=tick.bucket_was_read,
            bucket_is_given_up=tick.bucket_is_given_up,
        )
        _judge(tick, replica, view)
        if view.beat is not None and view.beat.changed:
            _judged(replica)


def _judge(tick: Tick, replica: Replica, view: ReplicaView) -> None:
    verdict = decisions.judge_replica(view)
    if verdict is None or verdict.to not in REPLICA_TRANSITIONS[view.state]:
        return
    begins = verdict.to in REPLICA_WORKING and replica.worked_since is None
    since, fell_at = replica.worked_since, replica.fell_at
    if begins:
        since, fell_at = tick.now, None
    if not transition_replica(
        replica, verdict.to, reason=verdict.reason, worked_since=since, fell_at=fell_at
    ):
        return
    tick.changes.replicas = True
    if begins:
        jobs.has_worked(tick.open_by_replica.get(replica.pk))
        circuit_breaker.count_success(replica.pool)
    elif view.state == ReplicaState.PROVISIONING and verdict.to in _FELL:
        circuit_breaker.count_failure(replica.pool, f"{replica}: {verdict.reason}")


def _judged(replica: Replica) -> None:
    """Control has used this beat: it moves the replica no more."""
    name = beat_name(replica)
    Replica.objects.filter(pk=replica.pk).update(beat_judged=name)
    replica.beat_judged = name


_FELL = (ReplicaState.FAILED, ReplicaState.LOST)


def relaunch(tick: Tick) -> None:
    """Schedule relaunches by policy, and call for every launch that is due."""
    if tick.over or tick.run.state not in RUN_LIVE | {RunState.PROVISIONING}:
        return
    open_by_replica = tick.open_by_replica
    for pool in {r.pool_id: r.pool for r in tick.replicas if r.pool.held}.values():
        prices.may_launch(pool)  # also where nothing waits any more
    due: set[int] = set()
    for replica in tick.replicas:
        delay_s = relaunch_delay_s(replica)
        if delay_s is not None:
            _schedule(tick, replica, delay_s)
        attempt = open_by_replica.get(replica.pk)
        if _launch_is_due(tick, replica, attempt):
            due.add(replica.pool_id)
    for pool_id in sorted(due):
        enqueue("launch_pool", pool_id, expires=LOST_TASK_AFTER.total_seconds())


def _schedule(tick: Tick, replica: Replica, delay_s: float) -> None:
    last = _last_attempt(replica)
    cause = last.cause if last else ""
    restarts = retry_policy.restarts_after(
        replica.restarts, cause=cause, worked_s=_worked_s(replica)
    )
    count = f"restart {restarts} of {tick.run.max_restarts}"
    if cause in retry_policy.INNOCENT:
        count = "restart, not counted,"
    tick.changes.replicas |= transition_replica(
        replica,
        ReplicaState.RESTARTING,
        reason=f"{count} in {delay_s:g} s, after: {replica.state_reason}",
        restarts=restarts,
        relaunch_at=tick.now + timedelta(seconds=delay_s),
        fell_at=tick.now,
    )


def relaunch_delay_s(replica: Replica) -> float | None:
    last = _last_attempt(replica) if replica.ended else None
    return retry_policy.relaunch_delay_s(
        ReplicaState(replica.state),
        restarts=retry_policy.held_against(replica.restarts, worked_s=_worked_s(replica)),
        cause=last.cause if last else "",
        exit_code=last.exit_code if last else None,
        max_restarts=replica.run.max_restarts,
    )


def _worked_s(replica: Replica) -> float:
    """Of an attempt that has ended: from its first beat at work to the end."""
    if replica.worked_since is None:
        return 0.0
    return (replica.state_since - replica.worked_since).total_seconds()


def _last_attempt(replica: Replica) -> ReplicaAttempt | None:
    return replica.attempts.order_by("-number").first()


def _launch_is_due(tick: Tick, replica: Replica, attempt: ReplicaAttempt | None) -> bool:
    now = tick.now
    waited = has_passed(replica.state_since, LOST_TASK_AFTER, now)
    if replica.state == ReplicaState.PROVISIONING:
        begun = attempt is not None and not attempt.is_complete
        return waited and begun and not circuit_breaker.is_closed(replica.pool, now)
    if not circuit_breaker.may_launch(replica.pool, now):
        return False
    if replica.state == ReplicaState.RESTARTING:
        due = attempt is None and is_due(replica.relaunch_at, retry_policy.RELAUNCH_WITHIN, now)
    else:
        due = waited and replica.state == ReplicaState.PENDING
    return due and _is_not_too_dear(tick, replica)


def _is_not_too_dear(tick: Tick, replica: Replica) -> bool:
    """One that is held says why; the reason goes with the launch."""
    if prices.may_launch(replica.pool):
        return True
    words = f"not launched: {replica.pool.held}"
    if replica.state_reason != words:
        waits = Replica.objects.filter(pk=replica.pk, state=replica.state)
        tick.changes.replicas |= bool(waits.update(state_reason=words))
        replica.state_reason = words
    return False


def call_off_launches(tick: Tick) -> None:
    """Launches that were begun, have no job, and are not wanted any more."""
    leaving = leaving_ids(tick)
    tick.jobs |= jobs.close_unlaunched(
        (
            attempt
            for attempt in tick.attempts
            # In jobs: there is a job, or the backend could not be asked.
            if attempt.replica_id not in tick.jobs and (tick.over or attempt.replica_id in leaving)
        ),
        now=tick.now,
    )


def give_up_on_silent_backends(tick: Tick) -> None:
    """In a run that was stopped, or is over, long ago."""
    told_at = tick.run.ended_at or tick.run.stop_requested_at
    if told_at is not None and has_passed(told_at, jobs.GIVE_UP_AFTER, tick.now):
        tick.jobs |= jobs.give_up(tick.attempts, tick.jobs, now=tick.now)
