"""Attempts that have not started: the cause, how long they can wait, and the next step.

A backend reports a :class:`~executors.base.PendingCause` while a job waits; the replica shows its
explanation. :mod:`runs.reconcile.retry_policy` defines the limit and the next step of each cause. A
job in a cluster queue has no limit and never counts as hung.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Q

from executors.base import JobState, NoCapacity, PendingCause, ReplicaStatus
from runs.backends import circuit_breaker
from runs.bulk import update_row
from runs.models import Replica, ReplicaAttempt
from runs.reconcile import retry_policy
from runs.reconcile.context import ReconcileContext
from runs.reconcile.retry_policy import NextStep
from runs.redaction import clean_text
from runs.states import ReplicaState
from runs.transitions import transition_replica

REPAIR_EVERY = timedelta(seconds=10)
"""How often a launch is repeated while its job lacks an object."""

_NOT_WAITING = ("", PendingCause.QUEUED)
"""Causes without a wait of our own: the job runs, or a cluster queue decides how long it waits."""

_WAITING = (ReplicaState.PROVISIONING, ReplicaState.SUSPECT)


def note_status(attempt: ReplicaAttempt, status: ReplicaStatus, now: datetime) -> None:
    """Record what a poll reports about an attempt's start."""
    cause = ""
    if status.state == JobState.PENDING:
        cause = str(status.pending or PendingCause.STARTING)
    elif status.state == JobState.UNKNOWN:
        return
    _note_cause(attempt.replica, cause, now)
    if status.state == JobState.RUNNING and attempt.launched_at is None:
        update_row(attempt, launched_at=now)  # it runs, so it is complete
    if cause and status.message:
        phase = f"{status.phase}: " if status.phase and status.phase not in status.message else ""
        _show(attempt.replica, f"{phase}{status.message}")
    if (
        cause == PendingCause.INCOMPLETE
        and attempt.launched_at is not None
        and now - attempt.launched_at > REPAIR_EVERY
    ):
        update_row(attempt, launched_at=None)  # the next launch completes the job


def note_no_capacity(replica: Replica, error: NoCapacity, now: datetime) -> None:
    """Record that a launch waits for a quota, a machine or a disk."""
    _note_cause(replica, error.pending, now)
    _show(replica, str(error))


def end_pending(context: ReconcileContext) -> None:
    """End attempts that waited longer than the limit of their cause, and take the next step. This
    does not count as a restart, because the replica has not run."""
    if context.over:
        return
    replicas = {replica.pk: replica for replica in context.replicas}
    for attempt in context.attempts:
        job, replica = context.jobs.get(attempt.replica_id), replicas.get(attempt.replica_id)
        if replica is None or replica.state not in _WAITING or attempt.ended_at is not None:
            continue
        if job is None or job.state != JobState.PENDING:
            continue
        waiting = attempt.replica  # updated by this tick's poll
        if not waiting.pending_cause or waiting.pending_since is None:
            continue
        cause = PendingCause(waiting.pending_cause)
        timeout_s = settings.PENDING_TIMEOUT_S
        limit_s = retry_policy.pending_limit_s(cause, timeout_s=timeout_s)
        waited_s = (context.now - waiting.pending_since).total_seconds()
        if limit_s is not None and waited_s <= limit_s and waiting.waiting_since is not None:
            # Alternating causes cannot add up to more than the longest wait.
            limit_s = retry_policy.total_pending_limit_s(timeout_s=timeout_s) or limit_s
            waited_s = (context.now - waiting.waiting_since).total_seconds()
        if limit_s is not None and waited_s > limit_s:
            _end(context, replica, attempt, cause, waited_s, job.message or waiting.backend_state)


def _end(
    context: ReconcileContext,
    replica: Replica,
    attempt: ReplicaAttempt,
    cause: PendingCause,
    waited_s: float,
    message: str,
) -> None:
    reason = f"not started after {waited_s:.0f} s ({cause}): {message}"
    message = clean_text(reason)
    update_row(attempt, Q(ended_at=None), cause=retry_policy.NOT_STARTED, message=message)
    context.changes.replicas |= transition_replica(
        replica,
        ReplicaState.RESTARTING,
        reason=reason,
        relaunch_at=context.now,
        cancel_at=context.now,
        pending_cause="",
        pending_since=None,
        waiting_since=None,
    )
    if retry_policy.after_pending(cause) is NextStep.INTERVENTION:
        circuit_breaker.require_intervention(replica.pool, reason)
    else:
        circuit_breaker.count_failure(replica.pool, reason)


def _note_cause(replica: Replica, cause: str, now: datetime) -> None:
    if replica.pending_cause == cause:
        return
    since = now if cause else None
    waiting = replica.waiting_since
    if cause in _NOT_WAITING or replica.pending_cause in _NOT_WAITING or waiting is None:
        waiting = None if cause in _NOT_WAITING else now
    update_row(replica, pending_cause=cause, pending_since=since, waiting_since=waiting)


def _show(replica: Replica, message: str) -> None:
    """Show a message as the reason of the replica's state while it is provisioning."""
    message = clean_text(message)
    if replica.state == ReplicaState.PROVISIONING and replica.state_reason != message:
        update_row(replica, Q(state=ReplicaState.PROVISIONING), state_reason=message)
