"""Polls and cancels the jobs of a run at their backends."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial

from django.db.models import Q

from executors.base import (
    Cause,
    ExecutorError,
    JobState,
    PendingCause,
    ReplicaHandle,
    ReplicaStatus,
)
from executors.executor import Executor
from runs.backends import circuit_breaker, shared_breakers
from runs.backends.executors import executor_for
from runs.backends.parallel_calls import CallTimeout, call_all
from runs.bulk import update_row
from runs.models import ReplicaAttempt, ReplicaPool, Run
from runs.reconcile import billing, pending
from runs.reconcile.decisions import Job
from runs.reconcile.retry_policy import NOT_STARTED
from runs.redaction import clean_text
from runs.states import REPLICA_ENDED, RUN_LIVE, ReplicaState, RunState
from runs.times import from_wall, has_passed

logger = logging.getLogger(__name__)

HANGING_PATIENCE_S = 2.0
"""Timeout of a cancel request while one of the accounts is known to hang."""

GIVE_UP_AFTER = timedelta(minutes=10)
"""How long a stopped run waits for a backend that does not report the state of its jobs."""

UNLAUNCHED_AFTER = timedelta(seconds=30)
"""A cancelled launch without a job after this time counts as failed. If it still succeeds,
:func:`runs.reconcile.launch.launch_replica` cancels the job."""

_SETTLED = REPLICA_ENDED | {ReplicaState.PENDING, ReplicaState.RESTARTING}


def attempts_to_poll(run: Run) -> list[ReplicaAttempt]:
    """Attempts that can have a job, and all attempts of replicas that are not settled; oldest
    first."""
    attempts = list(
        ReplicaAttempt.objects.filter(
            Q(ended_at=None) | ~Q(replica__state__in=_SETTLED), replica__run=run
        )
        .select_related("replica__pool__credential")
        .order_by("replica__number", "number")
    )
    for attempt in attempts:
        attempt.replica.run = run
    return attempts


def unprocessed_jobs(attempts: Iterable[ReplicaAttempt]) -> dict[int, Job]:
    """The end of each replica's newest attempt, by replica id, where the replica's state does not
    reflect it yet: the tick that closed the attempt was killed, or could not decide."""
    newest = {attempt.replica_id: attempt for attempt in attempts}
    return {
        replica_id: Job(
            state=JobState.ENDED,
            cause=attempt.cause,
            exit_code=attempt.exit_code,
            message=attempt.message,
        )
        for replica_id, attempt in newest.items()
        if attempt.ended_at is not None
    }


def poll_jobs(
    attempts: Sequence[ReplicaAttempt],
    *,
    now: datetime,
    before_ends: Callable[[], None] = lambda: None,
) -> dict[int, Job]:
    """Poll all jobs: one request per account, all accounts in parallel. Returns jobs by replica id.

    ``before_ends`` is called before the end of a job is written. An ended attempt is closed once.
    An attempt without a handle is looked up by its launch key, because the worker that launched it
    can have died before it stored the handle. Accounts that time out are skipped for a while
    (:mod:`runs.backends.shared_breakers`); the state of their jobs is unknown.
    """
    jobs: dict[int, Job] = {}
    groups = {
        shared_breakers.account_place(pool): (pool, group) for pool, group in _by_account(attempts)
    }
    polled: dict[str, list[ReplicaAttempt]] = {}
    for account, (_, group) in groups.items():
        if shared_breakers.is_open(account):
            jobs |= _unknown(group, "its backend did not answer and will be polled again shortly")
            continue
        deferred = {a.pk for a in group if _is_deferred(a, now)}
        polled[account] = [a for a in group if a.pk not in deferred]
        jobs |= _unknown(
            (a for a in group if a.pk in deferred), "its backend is not polled until its retry time"
        )
    answers = call_all(
        {account: partial(_poll_account, groups[account][0], of) for account, of in polled.items()}
    )
    for account, answer in answers.items():
        if isinstance(answer, CallTimeout):
            shared_breakers.failed(account, str(answer))
        elif account in groups:
            shared_breakers.answered(account)
        if isinstance(answer, Exception):
            level = (
                logging.WARNING
                if isinstance(answer, ExecutorError | CallTimeout)
                else logging.ERROR
            )
            logger.log(level, "%s could not be polled: %r", account, answer)
            jobs |= _unknown(polled[account], str(answer) or repr(answer))
    statuses = [
        (attempt, handle, status)
        for answer in answers.values()
        if not isinstance(answer, Exception)
        for attempt, handle, status in answer
    ]
    if any(status.state == JobState.ENDED for _, _, status in statuses):
        before_ends()
    for attempt, handle, status in statuses:
        if attempt.handle is None:
            save_handle(attempt, handle)
            attempt.handle = json.loads(handle.to_json())
        jobs[attempt.replica_id] = _record(attempt, status, now)
    return jobs


def save_handle(attempt: ReplicaAttempt, handle: ReplicaHandle) -> bool:
    """Record a job that was found by its launch key. It can be incomplete, so the launch continues.
    False if it was already recorded."""
    saved = ReplicaAttempt.objects.filter(pk=attempt.pk, handle__isnull=True).update(
        handle=json.loads(handle.to_json())
    )
    return bool(saved)


def _unknown(attempts: Iterable[ReplicaAttempt], message: str) -> dict[int, Job]:
    unknown = Job(state=JobState.UNKNOWN, message=message)
    return {attempt.replica_id: unknown for attempt in attempts}


_Statuses = list[tuple[ReplicaAttempt, ReplicaHandle, ReplicaStatus]]


def _poll_account(pool: ReplicaPool, attempts: Sequence[ReplicaAttempt]) -> _Statuses:
    """Poll one account. Runs in a thread, without the database."""
    if not attempts:
        return []
    executor = executor_for(pool)
    known = [(a, h) for a in attempts if (h := _handle(executor, a)) is not None]
    statuses = executor.poll([handle for _, handle in known]) if known else []
    return [(a, h, status) for (a, h), status in zip(known, statuses, strict=True)]


def _is_deferred(attempt: ReplicaAttempt, now: datetime) -> bool:
    """Whether a launch waits for its backend's ``Retry-After``. It is then not looked up, except in
    a run that is ending, so that the end does not wait."""
    replica = attempt.replica
    is_wanted = replica.run.state in RUN_LIVE | {RunState.PROVISIONING}
    return attempt.handle is None and is_wanted and circuit_breaker.is_open(replica.pool, now)


def _handle(executor: Executor, attempt: ReplicaAttempt) -> ReplicaHandle | None:
    if attempt.handle is not None:
        return ReplicaHandle(**attempt.handle)
    return executor.find(attempt.launch_key)


def _record(attempt: ReplicaAttempt, status: ReplicaStatus, now: datetime) -> Job:
    message = clean_text(status.message)
    backend_state = clean_text(status.phase or status.state, 64)
    if attempt.replica.backend_state != backend_state:
        update_row(attempt.replica, backend_state=backend_state)
    _save_times(attempt, status)
    if status.pending is PendingCause.QUEUED:
        billing.suspend(attempt)
    pending.note_status(attempt, status, now)
    if status.state == JobState.RUNNING:
        mark_started(attempt)
    if status.state == JobState.ENDED:
        ended_at = from_wall(status.ended_wall_s) or now
        not_started = attempt.cause == NOT_STARTED  # our own cause is more precise
        ReplicaAttempt.objects.filter(pk=attempt.pk, ended_at=None).update(
            ended_at=ended_at,
            cause=attempt.cause if not_started else status.cause or "",
            exit_code=status.exit_code,
            message=attempt.message if not_started else message,
            billed_s=status.billed_s,
        )
        attempt.ended_at = ended_at
        attempt.billed_s = status.billed_s
        attempt.cause = str(status.cause or "")
    return Job(
        state=status.state,
        cause=str(status.cause or ""),
        exit_code=status.exit_code,
        message=message,
    )


def _save_times(attempt: ReplicaAttempt, status: ReplicaStatus) -> None:
    """Store the start and the deadline as the backend reports them."""
    fields = {
        name: at
        for name, wall_s in (
            ("started_at", status.started_wall_s),
            ("deadline_at", status.deadline_wall_s),
        )
        if (at := from_wall(wall_s)) is not None
    }
    changed = {name: at for name, at in fields.items() if getattr(attempt, name) != at}
    if changed:
        update_row(attempt, **changed)


def mark_started(attempt: ReplicaAttempt | None) -> None:
    """Set the start of an attempt whose replica sent a heartbeat: it runs and is billed. Until the
    backend reports a start, it counts from the launch."""
    if attempt is None or attempt.started_at is not None or attempt.launched_at is None:
        return
    ReplicaAttempt.objects.filter(pk=attempt.pk, started_at=None).update(
        started_at=attempt.launched_at
    )
    attempt.started_at = attempt.launched_at


def close_unlaunched(attempts: Iterable[ReplicaAttempt], *, now: datetime) -> dict[int, Job]:
    """Close launches that are no longer wanted and have no job.

    Otherwise a worker that died between writing the launch key and calling the backend would keep a
    stopping run or replica waiting for ever.
    """
    message = "cancelled before it was launched"
    jobs: dict[int, Job] = {}
    for attempt in attempts:
        if attempt.handle is not None or attempt.ended_at is not None:
            continue
        if not has_passed(attempt.created_at, UNLAUNCHED_AFTER, now):
            continue
        unlaunched = Q(handle__isnull=True, ended_at=None)
        cause = Cause.CANCELLED
        if update_row(attempt, unlaunched, ended_at=now, cause=cause, message=message):
            jobs[attempt.replica_id] = Job(state=JobState.ENDED, cause=cause, message=message)
    return jobs


def give_up(
    attempts: Iterable[ReplicaAttempt], known: Mapping[int, Job], *, now: datetime
) -> dict[int, Job]:
    """Close attempts whose backend is unreachable, so that a deleted account cannot keep a stopped
    run open for ever. The reaper ends their jobs if the backend returns."""
    message = "given up: its backend is unreachable, so the job could be neither polled nor ended"
    jobs: dict[int, Job] = {}
    for attempt in attempts:
        job = known.get(attempt.replica_id)
        if attempt.ended_at is not None or job is None or job.state != JobState.UNKNOWN:
            continue
        cause = Cause.LOST
        if update_row(attempt, Q(ended_at=None), ended_at=now, cause=cause, message=message):
            jobs[attempt.replica_id] = Job(state=JobState.ENDED, cause=cause, message=message)
    return jobs


def cancel(attempts: Iterable[ReplicaAttempt]) -> None:
    """Ask the backends to end these jobs, all accounts in parallel. Repeated at every tick until
    the jobs have ended. A request that times out continues in its thread."""
    started = [a for a in attempts if a.ended_at is None and a.handle is not None]
    groups = {
        shared_breakers.account_place(pool): (pool, group) for pool, group in _by_account(started)
    }
    is_hanging = any(shared_breakers.is_open(account) for account in groups)
    answers = call_all(
        {account: partial(_cancel, pool, group) for account, (pool, group) in groups.items()},
        patience_s=HANGING_PATIENCE_S if is_hanging else None,
    )
    for account, answer in answers.items():
        if isinstance(answer, CallTimeout):
            shared_breakers.failed(account, str(answer))
        if isinstance(answer, Exception):
            logger.warning("%s: the request to end jobs failed: %r", account, answer)


def _cancel(pool: ReplicaPool, attempts: Sequence[ReplicaAttempt]) -> None:
    executor_for(pool).cancel([ReplicaHandle(**a.handle) for a in attempts if a.handle])


def _by_account(
    attempts: Iterable[ReplicaAttempt],
) -> list[tuple[ReplicaPool, list[ReplicaAttempt]]]:
    """Attempts grouped by account, each with a pool to make its executor from."""
    groups: dict[tuple[str, int | None], list[ReplicaAttempt]] = defaultdict(list)
    for attempt in attempts:
        pool = attempt.replica.pool
        groups[pool.backend, pool.credential_id].append(attempt)
    return [(group[0].replica.pool, group) for group in groups.values()]
