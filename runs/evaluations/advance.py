"""One step of an evaluation: launch its job, poll it, read its result, or end it.

Each step is conditional on the state in the database and can be repeated, run twice or be killed.
The result is stored once: a job that was relaunched, and a result that was in the bucket before,
lead to the same row. At most one evaluation of a run has a job, and older checkpoints come
first."""

from __future__ import annotations

import contextlib
import logging
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from diloco.exit_codes import EX_CONFIG
from diloco.protocol.records import BadRecord
from diloco.store.base import MissingKey, Store, StoreDenied, StoreError
from executors.base import (
    AccountError,
    Cause,
    ExecutorError,
    JobState,
    LaunchRefused,
    PendingCause,
    ReplicaStatus,
    RetryLater,
)
from runs.backends import budgets
from runs.bulk import update_row
from runs.evaluations import jobs
from runs.evaluations.results import read_result, store_result
from runs.evaluations.schedule import LONGEST_WAIT
from runs.ingest.journal import mark_due
from runs.ingest.objects import DigestMismatch, check_named
from runs.ingest.stores import store_for
from runs.models import Evaluation, EvaluationAttempt, Event
from runs.reconcile import retry_policy
from runs.redaction import clean_text
from runs.times import due, has_passed
from runs.transitions import record_event

logger = logging.getLogger(__name__)
State = Evaluation.State

EVERY = timedelta(seconds=2)
CLAIM = timedelta(minutes=5)
"""Time after which another step starts, if the worker of a step was killed."""
SOON = timedelta(seconds=10)
"""An older checkpoint whose evaluation is due so soon goes first: its weights are deleted first."""
AFTER_BUDGET = timedelta(minutes=5)
FIRST_RETRY, LATER_RETRY = timedelta(seconds=10), timedelta(minutes=1)
"""Pauses after an error, and after the same error again."""
GIVE_UP = timedelta(hours=6)
"""How long an unavailable backend or bucket is retried, after the time limit of a job that runs."""
UNLAUNCHED_AFTER = timedelta(seconds=30)
"""A cancelled launch without a job after this time has none."""


def advance(evaluation_id: int) -> None:
    """Make the next step, if it is due and no other worker has claimed it."""
    now = timezone.now()
    claimed = Evaluation.objects.filter(
        due("next_at", LONGEST_WAIT, now), pk=evaluation_id, state__in=Evaluation.ACTIVE
    ).update(next_at=now + CLAIM)
    if not claimed:
        return
    row = Evaluation.objects.select_related(
        "run__owner", "run__store_credential", "plan__credential", "plan__created_by"
    ).get(pk=evaluation_id)
    try:
        again = _step(row, now)
    except (LaunchRefused, StoreDenied, DigestMismatch, BadRecord) as error:
        launched = row.attempts.filter(ended_at=None, launched_at__isnull=False)
        if isinstance(error, AccountError) and launched.exists():
            _retry_later(row, error, now)  # the job goes on while its account needs an operator
        else:
            _fail(row, str(error))
    except NotStarted as error:
        update_row(
            row,
            Q(state__in=Evaluation.ACTIVE),
            message=clean_text(str(error), 500),
            next_at=now + EVERY,
            retrying_since=row.retrying_since,
        )
    except (ExecutorError, StoreError) as error:
        _retry_later(row, error, now)
    except Exception as error:  # it would hold the other evaluations of the run, unseen
        logger.exception("evaluation %s: the step failed", row.pk)
        _retry_later(row, RuntimeError(f"{type(error).__name__}: {error}"), now)
    else:
        is_over = row.retrying_since is not None and row.state == State.RUNNING
        Evaluation.objects.filter(pk=row.pk, state__in=Evaluation.ACTIVE).update(
            next_at=now + again, retrying_since=None, **({"message": ""} if is_over else {})
        )


def _step(row: Evaluation, now: datetime) -> timedelta:
    """One step; returns the pause before the next one."""
    attempt = row.attempts.order_by("-number").first()
    if attempt is not None:
        attempt.evaluation = row
    is_open = attempt is not None and attempt.ended_at is None
    if row.state == State.CANCELLING:
        _cancel(row, attempt if is_open else None, now)
    elif attempt is None or row.state == State.QUEUED:
        return _begin(row, now)
    else:
        if is_open and attempt.launched_at is None:
            jobs.launch(attempt, store_for(row.run))
        if is_open:
            status = jobs.poll(attempt)
            if status is None or status.state != JobState.ENDED:
                _check_start(row, attempt, status, now)
                return EVERY
            jobs.close(attempt, status)
        _settle(row, attempt)
    return EVERY


class NotStarted(Exception):
    """The job waits for its start; the message begins with the cause."""


def _check_start(
    row: Evaluation, attempt: EvaluationAttempt, status: ReplicaStatus | None, now: datetime
) -> None:
    """Raise :class:`NotStarted` for a job that waits, and end it after the limit of the cause;
    otherwise it would hold the other evaluations of the run. That counts as a failed attempt."""
    if status is None or status.state == JobState.RUNNING:
        return
    _check_known(status)
    cause = status.pending or PendingCause.STARTING
    limit_s = retry_policy.pending_limit_s(cause, timeout_s=settings.PENDING_TIMEOUT_S)
    if limit_s is None:
        return
    if not row.message.startswith(f"{cause}:"):
        row.retrying_since = now
    since = row.retrying_since or now
    if has_passed(since, timedelta(seconds=limit_s), now):
        reason = f"not started after {(now - since).total_seconds():.0f} s ({cause})"
        message = clean_text(f"{reason}: {status.message}", 500)
        update_row(attempt, cause=retry_policy.NOT_STARTED, message=message)
        jobs.cancel(attempt)
    raise NotStarted(f"{cause}: {status.message}".rstrip())


def _check_known(status: ReplicaStatus) -> None:
    """Raise :class:`RetryLater` for a job whose state is unknown, so that it is given up in the
    end."""
    if status.state == JobState.UNKNOWN:
        raise RetryLater(status.message or "the backend does not report the state of the job")


def _begin(row: Evaluation, now: datetime) -> timedelta:
    """Launch the first or next attempt, unless the bucket has the result already."""
    if not row.plan.enabled:  # it was queued while the plan was removed
        _end(row, State.CANCELLED, "its evaluation was removed")
        return EVERY
    store = store_for(row.run)
    with contextlib.suppress(BadRecord):  # the job replaces it
        if (result := read_result(row, store)) is not None:
            store_result(row, result)
            return EVERY
    if refusal := _refusal(row, now):
        update_row(row, Q(state=State.QUEUED), message=clean_text(refusal, 500))
        return AFTER_BUDGET
    others = Evaluation.objects.filter(run=row.run).exclude(pk=row.pk)
    busy = Q(state__in=Evaluation.WITH_JOB)
    older = Q(state=State.QUEUED, round__lt=row.round, next_at__lte=now + SOON)
    if others.filter(busy | older).exists():
        return EVERY
    if reason := _missing_weights(row, store):
        _end(row, State.SKIPPED, reason)
        return EVERY
    attempt = jobs.begin_attempt(row)
    if attempt is not None:
        jobs.launch(attempt, store)
    return EVERY


def _refusal(row: Evaluation, now: datetime) -> str:
    run = row.run
    if run.budget_usd and run.cost_usd >= run.budget_usd:
        return f"the run's budget of ${run.budget_usd:,.2f} is spent"
    return budgets.refusal_of(run, now)


def _missing_weights(row: Evaluation, store: Store) -> str:
    """Why the weights cannot be evaluated; '' if they are there."""
    checkpoints = list(row.run.checkpoints.filter(round=row.round).order_by("final"))
    for checkpoint in checkpoints:
        check_named(checkpoint)
        try:
            store.get_range(checkpoint.key, 0, 1)
        except MissingKey:
            continue
        return ""
    return f"the weights of round {row.round} were deleted after two newer checkpoints"


def _settle(row: Evaluation, attempt: EvaluationAttempt) -> None:
    """Store the result of a job that has ended, or queue the next attempt."""
    result = read_result(row, store_for(row.run))
    if result is None:
        _after_failure(row, attempt)
    else:
        store_result(row, result)


def _after_failure(row: Evaluation, attempt: EvaluationAttempt) -> None:
    """Queue the next attempt, or end the evaluation."""
    reason = _last_error(attempt)
    failures = row.failures + 1
    is_final = attempt.exit_code == EX_CONFIG or attempt.cause == Cause.DEADLINE
    if is_final or failures >= row.plan.max_attempts:
        _end(row, State.FAILED, reason, failures=failures)
        return
    update_row(
        row,
        Q(state=State.RUNNING),
        state=State.QUEUED,
        failures=failures,
        message=clean_text(f"attempt {attempt.number} failed: {reason}", 500),
    )


def _last_error(attempt: EvaluationAttempt) -> str:
    """The job's own error line, or how the backend ended it."""
    lines = [line.strip() for line in attempt.log.splitlines() if line.strip()]
    errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    code = "" if attempt.exit_code is None else f"exit status {attempt.exit_code}"
    ended = ", ".join(part for part in (attempt.cause, code, attempt.message) if part)
    if attempt.cause == Cause.DEADLINE:
        return f"not finished within {attempt.evaluation.plan.timeout_s} s"
    if attempt.cause == retry_policy.NOT_STARTED:
        return attempt.message
    return errors[-1] if errors else f"the job wrote no result ({ended or 'ended'})"


def _cancel(row: Evaluation, attempt: EvaluationAttempt | None, now: datetime) -> None:
    """Ask the backend to end the job; once it has ended, end the evaluation."""
    if attempt is not None:
        status = jobs.poll(attempt)
        if status is not None and status.state != JobState.ENDED:
            jobs.cancel(attempt)
            _check_known(status)
            return
        if status is not None:
            jobs.close(attempt, status)
        elif has_passed(attempt.created_at, UNLAUNCHED_AFTER, now):
            update_row(attempt, ended_at=now, cause=Cause.CANCELLED)
        else:
            return
    _end(row, State.CANCELLED, "cancelled")


def _retry_later(row: Evaluation, error: Exception, now: datetime) -> None:
    """Wait for a backend or a bucket that is unavailable, but not for ever. The time in which the
    evaluation waited for its turn does not count."""
    since, limit = row.retrying_since or now, GIVE_UP
    if row.attempts.filter(ended_at=None, launched_at__isnull=False).exists():
        limit += timedelta(seconds=row.plan.timeout_s)
    if has_passed(since, limit, now):
        _fail(row, str(error))
        return
    message = clean_text(str(error), 500)
    wait = FIRST_RETRY if row.message != message else LATER_RETRY
    logger.warning("evaluation %s: %s", row.pk, message)
    active = Q(state__in=Evaluation.ACTIVE)
    update_row(row, active, message=message, next_at=now + wait, retrying_since=since)


def _fail(row: Evaluation, reason: str) -> None:
    """End the evaluation. The reaper ends a job that it can still have."""
    now = timezone.now()
    row.attempts.filter(ended_at=None).update(
        ended_at=now, cause="refused", message=clean_text(reason, 500)
    )
    _end(row, State.FAILED, reason)


def _end(row: Evaluation, to: State, reason: str, **more: int) -> None:
    message = clean_text(reason, 500)
    active = Q(state__in=Evaluation.ACTIVE)
    if update_row(row, active, state=to, message=message, ended_at=timezone.now(), **more):
        level = Event.Level.WARNING if to == State.FAILED else Event.Level.INFO
        record_event(
            row.run,
            "evaluation",
            f"{row.plan} of round {row.round} {to}: {message}",
            level=level,
        )
        mark_due(row.run)
