"""Attempts that have not started: why, since when, for how long at most, and what comes next.

A backend reports a :class:`~executors.base.PendingCause` while a job waits. The replica shows the
backend's explanation as its reason. :mod:`runs.reconcile.retry_policy` has the limit and the next
step of each cause; a job that waits in a queue of its cluster has no limit and is never taken for
hung.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.conf import settings

from executors.base import JobState, NoCapacity, PendingCause, ReplicaStatus
from runs.backends import circuit_breaker
from runs.models import Replica, ReplicaAttempt
from runs.reconcile import retry_policy
from runs.reconcile.context import Tick
from runs.reconcile.retry_policy import NextStep
from runs.states import ReplicaState
from runs.transitions import clean_text, transition_replica

REPAIR_EVERY = timedelta(seconds=10)
"""How often a launch whose job lacks an object is repeated."""

_NOT_WAITING = ("", PendingCause.QUEUED)
"""It runs, or its queue decides how long it waits."""

_WAITING = (ReplicaState.PROVISIONING, ReplicaState.SUSPECT)


def note_status(attempt: ReplicaAttempt, status: ReplicaStatus, now: datetime) -> None:
    """Record what a poll says of an attempt's start."""
    cause = ""
    if status.state == JobState.PENDING:
        cause = str(status.pending or PendingCause.STARTING)
    elif status.state == JobState.UNKNOWN:
        return
    _note_cause(attempt.replica, cause, now)
    if status.state == JobState.RUNNING and attempt.launched_at is None:
        _set_launched(attempt, now)  # it runs, so nothing is missing
    if cause and status.message:
        phase = f"{status.phase}: " if status.phase and status.phase not in status.message else ""
        _show(attempt.replica, f"{phase}{status.message}")
    if (
        cause == PendingCause.INCOMPLETE
        and attempt.launched_at is not None
        and now - attempt.launched_at > REPAIR_EVERY
    ):
        _set_launched(attempt, None)  # the next launch completes it


def note_no_capacity(replica: Replica, error: NoCapacity, now: datetime) -> None:
    """Record that a launch waits for a quota, a machine or a disk."""
    _note_cause(replica, error.pending, now)
    _show(replica, str(error))


def end_pending(tick: Tick) -> None:
    """End attempts that have waited for longer than the limit of their cause, and take the next
    step. It counts as no restart: the replica has not run."""
    if tick.over:
        return
    replicas = {replica.pk: replica for replica in tick.replicas}
    for attempt in tick.attempts:
        job, replica = tick.jobs.get(attempt.replica_id), replicas.get(attempt.replica_id)
        if replica is None or replica.state not in _WAITING or attempt.ended_at is not None:
            continue
        if job is None or job.state != JobState.PENDING:
            continue
        waiting = attempt.replica  # as the poll of this tick has left it
        if not waiting.pending_cause or waiting.pending_since is None:
            continue
        cause = PendingCause(waiting.pending_cause)
        timeout_s = settings.PENDING_TIMEOUT_S
        limit_s = retry_policy.pending_limit_s(cause, timeout_s=timeout_s)
        waited_s = (tick.now - waiting.pending_since).total_seconds()
        if limit_s is not None and waited_s <= limit_s and waiting.waiting_since is not None:
            # Causes that alternate do not add up to more than the longest wait.
            limit_s = retry_policy.total_pending_limit_s(timeout_s=timeout_s) or limit_s
            waited_s = (tick.now - waiting.waiting_since).total_seconds()
        if limit_s is not None and waited_s > limit_s:
            _end(tick, replica, attempt, cause, waited_s, job.message or waiting.backend_state)


def _end(
    tick: Tick,
    replica: Replica,
    attempt: ReplicaAttempt,
    cause: PendingCause,
    waited_s: float,
    message: str,
) -> None:
    reason = f"not started after {waited_s:.0f} s ({cause}): {message}"
    ReplicaAttempt.objects.filter(pk=attempt.pk, ended_at=None).update(
        cause=retry_policy.NOT_STARTED, message=clean_text(reason)
    )
    attempt.cause, attempt.message = retry_policy.NOT_STARTED, clean_text(reason)
    tick.changes.replicas |= transition_replica(
        replica,
        ReplicaState.RESTARTING,
        reason=reason,
        relaunch_at=tick.now,
        cancel_at=tick.now,
        pending_cause="",
        pending_since=None,
        waiting_since=None,
    )
    if retry_policy.after_pending(cause) is NextStep.INTERVENTION:
        circuit_breaker.call_person(replica.pool, reason)
    else:
        circuit_breaker.count_failure(replica.pool, reason)


def _note_cause(replica: Replica, cause: str, now: datetime) -> None:
    if replica.pending_cause == cause:
        return
    since = now if cause else None
    waiting = replica.waiting_since
    if cause in _NOT_WAITING or replica.pending_cause in _NOT_WAITING or waiting is None:
        waiting = None if cause in _NOT_WAITING else now
    Replica.objects.filter(pk=replica.pk).update(
        pending_cause=cause, pending_since=since, waiting_since=waiting
    )
    replica.pending_cause, replica.pending_since, replica.waiting_since = cause, since, waiting


def _show(replica: Replica, message: str) -> None:
    """As the reason of its state: what runs already has another."""
    message = clean_text(message)
    if replica.state != ReplicaState.PROVISIONING or replica.state_reason == message:
        return
    Replica.objects.filter(pk=replica.pk, state=ReplicaState.PROVISIONING).update(
        state_reason=message
    )
    replica.state_reason = message


def _set_launched(attempt: ReplicaAttempt, at: datetime | None) -> None:
    ReplicaAttempt.objects.filter(pk=attempt.pk).update(launched_at=at)
    attempt.launched_at = at
