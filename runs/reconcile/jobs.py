"""What backends say of a run's jobs, and asking them to end some."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial

from django.db.models import Q

from executors.base import (
    Cause,
    ExecutorError,
    JobState,
    PendingCause,
    ReplicaHandle,
    ReplicaStatus,
    ServerlessExecutor,
)
from runs.backends import circuit_breaker, shared_breakers
from runs.backends.executors import executor_for
from runs.backends.parallel_calls import NoAnswer, ask_all
from runs.models import Replica, ReplicaAttempt, ReplicaPool, Run
from runs.reconcile import billing, pending
from runs.reconcile.decisions import Job
from runs.reconcile.launch import save_handle
from runs.reconcile.retry_policy import NOT_STARTED
from runs.states import REPLICA_ENDED, RUN_LIVE, ReplicaState, RunState
from runs.times import has_passed
from runs.transitions import clean_text

logger = logging.getLogger(__name__)

HANGING_PATIENCE_S = 2.0
"""For a request to end jobs while one of the accounts is known not to answer."""

GIVE_UP_AFTER = timedelta(minutes=10)
"""How long a run that was stopped waits for a backend that cannot be asked how its jobs are."""

UNLAUNCHED_AFTER = timedelta(seconds=30)
"""An unwanted launch that left no job by then is taken to have died; one that still comes through
is cancelled by :func:`runs.reconcile.launch.launch_replica`."""

_SETTLED = REPLICA_ENDED | {ReplicaState.PENDING, ReplicaState.RESTARTING}


def attempts_to_look_at(run: Run) -> list[ReplicaAttempt]:
    """Attempts that may still have a job, and all of replicas that wait for nothing; oldest
    first."""
    return list(
        ReplicaAttempt.objects.filter(
            Q(ended_at=None) | ~Q(replica__state__in=_SETTLED), replica__run=run
        )
        .select_related("replica__pool__credential", "replica__run")
        .order_by("replica__number", "number")
    )


def unjudged_jobs(attempts: Iterable[ReplicaAttempt]) -> dict[int, Job]:
    """Replica id -> the end of its newest attempt, of replicas that do not reflect it yet: the
    tick that closed the attempt was killed before it could judge, or could not judge then."""
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
    """Replica id -> what its backend says; one question per account for all its jobs, and all
    accounts at once. ``before_ends`` is called before the end of a job is written.

    An attempt that has ended is closed, once. One without a handle is looked for by its launch key:
    the worker that launched it may have died before it could say so. An account that does not
    answer in time is left alone for a while (:mod:`runs.backends.shared_breakers`): its jobs are
    unknown.
    """
    jobs: dict[int, Job] = {}
    groups = {
        shared_breakers.account_place(pool): (pool, group) for pool, group in _by_account(attempts)
    }
    asked: dict[str, list[ReplicaAttempt]] = {}
    for place, (_, group) in groups.items():
        if shared_breakers.is_open(place):
            jobs |= _unknown(group, "its backend did not answer, and is asked again in a moment")
            continue
        alone = {a.pk for a in group if _is_left_alone(a, now)}
        asked[place] = [a for a in group if a.pk not in alone]
        jobs |= _unknown(
            (a for a in group if a.pk in alone), "its backend is left alone for a while"
        )
    answers = ask_all({place: partial(_look, groups[place][0], of) for place, of in asked.items()})
    for place, answer in answers.items():
        if isinstance(answer, NoAnswer):
            shared_breakers.failed(place, str(answer))
        elif place in groups:
            shared_breakers.answered(place)
        if isinstance(answer, Exception):
            level = (
                logging.WARNING if isinstance(answer, ExecutorError | NoAnswer) else logging.ERROR
            )
            logger.log(level, "%s could not be asked: %r", place, answer)
            jobs |= _unknown(asked[place], str(answer) or repr(answer))
    found = [
        (attempt, handle, status)
        for answer in answers.values()
        if not isinstance(answer, Exception)
        for attempt, handle, status in answer
    ]
    if any(status.state == JobState.ENDED for _, _, status in found):
        before_ends()
    for attempt, handle, status in found:
        if attempt.handle is None:
            save_handle(attempt, handle)
            attempt.handle = json.loads(handle.to_json())
        jobs[attempt.replica_id] = _record(attempt, status, now)
    return jobs


def _unknown(attempts: Iterable[ReplicaAttempt], message: str) -> dict[int, Job]:
    unknown = Job(state=JobState.UNKNOWN, message=message)
    return {attempt.replica_id: unknown for attempt in attempts}


_Seen = list[tuple[ReplicaAttempt, ReplicaHandle, ReplicaStatus]]


def _look(pool: ReplicaPool, attempts: Sequence[ReplicaAttempt]) -> _Seen:
    """Ask one account. Runs in a thread, without the database."""
    if not attempts:
        return []
    executor = executor_for(pool)
    known = [(a, h) for a in attempts if (h := _handle(executor, a)) is not None]
    statuses = executor.poll([handle for _, handle in known]) if known else []
    return [(a, h, status) for (a, h), status in zip(known, statuses, strict=True)]


def _is_left_alone(attempt: ReplicaAttempt, now: datetime) -> bool:
    """A launch that its backend put off (``Retry-After``) is not looked for before that time; in a
    run that ends it is, so that the end does not wait."""
    replica = attempt.replica
    wanted = replica.run.state in RUN_LIVE | {RunState.PROVISIONING}
    return attempt.handle is None and wanted and circuit_breaker.is_closed(replica.pool, now)


def _handle(executor: ServerlessExecutor, attempt: ReplicaAttempt) -> ReplicaHandle | None:
    if attempt.handle is not None:
        return ReplicaHandle(**attempt.handle)
    return executor.find(attempt.launch_key)


def _record(attempt: ReplicaAttempt, status: ReplicaStatus, now: datetime) -> Job:
    message = clean_text(status.message)
    said = clean_text(status.phase or status.state, 64)
    if attempt.replica.backend_state != said:
        Replica.objects.filter(pk=attempt.replica_id).update(backend_state=said)
        attempt.replica.backend_state = said
    _save_times(attempt, status)
    if status.pending is PendingCause.QUEUED:
        billing.suspend(attempt)
    pending.note_status(attempt, status, now)
    if status.state == JobState.RUNNING:
        has_worked(attempt)
    if status.state == JobState.ENDED:
        ended_at = now
        if status.ended_wall_s is not None:
            ended_at = datetime.fromtimestamp(status.ended_wall_s, tz=UTC)
        not_started = attempt.cause == NOT_STARTED  # why it was cancelled is known better here
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
    """When it began and when it will be ended, in the backend's words."""
    fields = {
        name: datetime.fromtimestamp(wall_s, tz=UTC)
        for name, wall_s in (
            ("started_at", status.started_wall_s),
            ("deadline_at", status.deadline_wall_s),
        )
        if wall_s is not None
    }
    changed = {name: at for name, at in fields.items() if getattr(attempt, name) != at}
    if changed:
        ReplicaAttempt.objects.filter(pk=attempt.pk).update(**changed)
        for name, at in changed.items():
            setattr(attempt, name, at)


def has_worked(attempt: ReplicaAttempt | None) -> None:
    """A beat came of it, so it runs, and is paid for, whatever its backend could say of when it
    began: as long as it says nothing, from the launch on."""
    if attempt is None or attempt.started_at is not None or attempt.launched_at is None:
        return
    ReplicaAttempt.objects.filter(pk=attempt.pk, started_at=None).update(
        started_at=attempt.launched_at
    )
    attempt.started_at = attempt.launched_at


def close_unlaunched(attempts: Iterable[ReplicaAttempt], *, now: datetime) -> dict[int, Job]:
    """Close launches that nobody wants any more and that the backend knows no job of.

    Without this a worker that died between writing the launch key down and calling the backend
    would keep a stopping run or replica waiting for ever.
    """
    message = "called off before it was launched"
    jobs: dict[int, Job] = {}
    for attempt in attempts:
        if attempt.handle is not None or attempt.ended_at is not None:
            continue
        if not has_passed(attempt.created_at, UNLAUNCHED_AFTER, now):
            continue
        if ReplicaAttempt.objects.filter(pk=attempt.pk, handle__isnull=True, ended_at=None).update(
            ended_at=now, cause=Cause.CANCELLED, message=message
        ):
            attempt.ended_at = now
            jobs[attempt.replica_id] = Job(
                state=JobState.ENDED, cause=Cause.CANCELLED, message=message
            )
    return jobs


def give_up(
    attempts: Iterable[ReplicaAttempt], known: Mapping[int, Job], *, now: datetime
) -> dict[int, Job]:
    """Close attempts of which the backend could not be told or asked anything: an account that is
    gone would keep a stopped run for ever. Their jobs are ended by the reaper, when it can."""
    message = "given up: its backend could not be asked, neither how it is nor to end it"
    jobs: dict[int, Job] = {}
    for attempt in attempts:
        job = known.get(attempt.replica_id)
        if attempt.ended_at is not None or job is None or job.state != JobState.UNKNOWN:
            continue
        if ReplicaAttempt.objects.filter(pk=attempt.pk, ended_at=None).update(
            ended_at=now, cause=Cause.LOST, message=message
        ):
            attempt.ended_at, attempt.cause = now, Cause.LOST
            jobs[attempt.replica_id] = Job(state=JobState.ENDED, cause=Cause.LOST, message=message)
    return jobs


def cancel(attempts: Iterable[ReplicaAttempt]) -> None:
    """Ask the backends to end these jobs, all accounts at once; asked again at every tick until
    they have. A request that is not answered in time goes on in its thread."""
    started = [a for a in attempts if a.ended_at is None and a.handle is not None]
    groups = {
        shared_breakers.account_place(pool): (pool, group) for pool, group in _by_account(started)
    }
    hangs = any(shared_breakers.is_open(place) for place in groups)
    answers = ask_all(
        {place: partial(_cancel, pool, group) for place, (pool, group) in groups.items()},
        patience_s=HANGING_PATIENCE_S if hangs else None,
    )
    for place, answer in answers.items():
        if isinstance(answer, NoAnswer):
            shared_breakers.failed(place, str(answer))
        if isinstance(answer, Exception):
            logger.warning("%s could not be asked to end jobs: %r", place, answer)


def _cancel(pool: ReplicaPool, attempts: Sequence[ReplicaAttempt]) -> None:
    executor_for(pool).cancel([ReplicaHandle(**a.handle) for a in attempts if a.handle])


def _by_account(
    attempts: Iterable[ReplicaAttempt],
) -> list[tuple[ReplicaPool, list[ReplicaAttempt]]]:
    """Attempts that one executor answers for, with a pool to make it for."""
    groups: dict[tuple[str, int | None], list[ReplicaAttempt]] = defaultdict(list)
    for attempt in attempts:
        pool = attempt.replica.pool
        groups[pool.backend, pool.credential_id].append(attempt)
    return [(group[0].replica.pool, group) for group in groups.values()]
