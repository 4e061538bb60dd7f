"""Finds and ends orphaned, stale and duplicate jobs.

Every minute the live jobs of each account of this deployment are listed. A job is

- *orphaned* if no attempt has its launch key (the database was restored, the run was deleted);
- *stale* if its attempt is closed (a launch that succeeded after it was cancelled);
- a *duplicate* if its attempt has another job (a backend without unique names ran one launch
  twice).

Such a job is cancelled, or only reported under the policy ``report``. The opposite case, a missing
job that the database expects, is found by the reconciler's poll (cause *lost*).

Only jobs that carry this deployment's mark count, and only those found twice, a minute apart, are
ended: the first time, a launch can be between *start* and *save*.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from django.conf import settings
from django.utils import timezone

from executors.base import ExecutorError, ReplicaHandle
from executors.loading import wait_loaded
from runs import live_stream
from runs.backends.executors import BACKENDS, executor_of
from runs.backends.parallel_calls import CallTimeout, call_all
from runs.models import (
    Credential,
    EvaluationAttempt,
    EvaluationPlan,
    OrphanJob,
    ReplicaAttempt,
    ReplicaPool,
    Run,
)
from runs.queries.replica_history import console_url
from runs.redaction import clean_text, redact
from runs.transitions import record_event

logger = logging.getLogger(__name__)

SEEN_FOR_S = 600
"""How long the first sighting of a job is remembered."""
URL_LENGTH = 500
MOST_STORED = 200
"""Unwanted jobs of an account that are stored for pages."""
FORGET_AFTER = timedelta(days=1)
ACTIVE_WITHIN = timedelta(days=7)
"""Accounts of runs that ended earlier are not listed: no backend runs a job longer."""


@dataclass(frozen=True, kw_only=True)
class UnwantedJob:
    """An unwanted job, and why it is unwanted."""

    handle: ReplicaHandle
    why: str
    attempt: ReplicaAttempt | None = None


def reap() -> int:
    """Check every account once; return the number of jobs that were asked to end."""
    now = timezone.now()
    forget_orphans(now)
    ended = 0
    checked: set[str] = set()  # two credentials can belong to one account
    for backend, credential in accounts(now):
        try:
            ended += _reap_account(backend, credential, checked, now)
        except ExecutorError as error:
            logger.warning("%s: the jobs could not be listed: %s", backend, error)
        except Exception:  # the other accounts are checked nevertheless
            logger.exception("%s: the jobs could not be checked", backend)
    return ended


def _reap_account(
    backend: str, credential: Credential | None, checked: set[str], now: datetime
) -> int:
    """Check one account, except the jobs of ``checked``, to which its jobs are added."""
    executor = executor_of(backend, credential)
    handles = [h for h in executor.live() if h.to_json() not in checked]
    checked |= {handle.to_json() for handle in handles}
    suspects = orphans(handles, duplicates=not executor.capabilities.unique_names)
    store_orphans(backend, credential, suspects, now)
    due = [job for job in suspects if _seen_before(backend, job.handle)]
    is_ended = settings.REAPER_POLICY == "cancel"
    if is_ended:
        executor.cancel([job.handle for job in due])
    for job in due:
        _report(backend, job)
    return len(due) if is_ended else 0


@dataclass(frozen=True, kw_only=True)
class AccountJob:
    """An unwanted job and its account."""

    backend: str
    credential: Credential | None
    job: UnwantedJob


def find_orphans(now: datetime) -> tuple[list[AccountJob], list[str]]:
    """List unwanted jobs for an operator, without remembering or ending any.

    The second value lists the accounts that did not answer within
    :data:`runs.backends.parallel_calls.PATIENCE_S`, with the reason.
    """
    accounts_by_name = {
        f"{BACKENDS[backend]} with {credential or 'the server environment'}": (backend, credential)
        for backend, credential in accounts(now)
        if backend in BACKENDS  # an imported run can name an unknown backend
    }

    def live_jobs(account: tuple[str, Credential | None]) -> tuple[list[ReplicaHandle], bool]:
        executor = executor_of(*account)
        return executor.live(), not executor.capabilities.unique_names

    wait_loaded({backend for backend, _ in accounts_by_name.values()})
    answers = call_all(
        {name: partial(live_jobs, account) for name, account in accounts_by_name.items()}
    )
    jobs, unreachable, seen = [], [], set()
    for name, answer in answers.items():
        if isinstance(answer, Exception):
            known = isinstance(answer, ExecutorError | CallTimeout)
            message = redact(str(answer)) if known else type(answer).__name__
            unreachable.append(f"{name} could not be listed: {message}")
            continue
        handles = [handle for handle in answer[0] if handle.to_json() not in seen]
        seen |= {handle.to_json() for handle in handles}
        backend, credential = accounts_by_name[name]
        jobs += [
            AccountJob(backend=backend, credential=credential, job=job)
            for job in orphans(handles, duplicates=answer[1])
        ]
    return jobs, unreachable


def end(account_job: AccountJob) -> str:
    """End the job and record an event on its run; return the error, '' if there was none."""
    try:
        executor_of(account_job.backend, account_job.credential).cancel([account_job.job.handle])
    except ExecutorError as error:
        return redact(str(error))
    _report(account_job.backend, account_job.job, done="ended by an administrator")
    return ""


def accounts(now: datetime) -> list[tuple[str, Credential | None]]:
    """The backend and credential of every pool and evaluation plan that can have jobs, and every
    stored credential, whose orphans can belong to deleted runs."""
    pools = ReplicaPool.objects.exclude(run__ended_at__lt=now - ACTIVE_WITHIN)
    plans = EvaluationPlan.objects.exclude(
        run__ended_at__lt=now - ACTIVE_WITHIN, evaluations__ended_at__lt=now - ACTIVE_WITHIN
    )
    used = {
        (row.backend, row.credential)
        for rows in (pools, plans)
        for row in rows.select_related("credential")
    }
    stored = {(c.kind, c) for c in Credential.objects.filter(kind__in=BACKENDS)}
    return sorted(used | stored, key=lambda account: (account[0], str(account[1] or "")))


def orphans(handles: Iterable[ReplicaHandle], *, duplicates: bool) -> list[UnwantedJob]:
    """The unwanted jobs. ``duplicates``: the backend can run two jobs for one launch key."""
    handles = list(handles)
    evaluations = dict(
        EvaluationAttempt.objects.filter(
            launch_key__in=[handle.launch_key for handle in handles]
        ).values_list("launch_key", "ended_at")
    )
    attempts = {
        attempt.launch_key: attempt
        for attempt in ReplicaAttempt.objects.filter(
            launch_key__in=[handle.launch_key for handle in handles]
        ).select_related("replica__run")
    }
    jobs = []
    for handle in handles:
        attempt = attempts.get(handle.launch_key)
        if handle.launch_key in evaluations:
            if evaluations[handle.launch_key] is not None:
                jobs.append(UnwantedJob(handle=handle, why="its attempt has ended"))
        elif attempt is None:
            jobs.append(UnwantedJob(handle=handle, why="no attempt has its launch key"))
        elif attempt.ended_at is not None:
            jobs.append(UnwantedJob(handle=handle, why="its attempt has ended", attempt=attempt))
        elif (
            duplicates
            and attempt.handle is not None
            and dict(attempt.handle.get("data", {})) != dict(handle.data)
        ):
            jobs.append(
                UnwantedJob(handle=handle, why="its attempt has another job", attempt=attempt)
            )
    return jobs


def store_orphans(
    backend: str, credential: Credential | None, jobs: Iterable[UnwantedJob], now: datetime
) -> None:
    """Store the unwanted jobs of an account, and delete those that it no longer lists."""
    kept = []
    for job in itertools.islice(jobs, MOST_STORED):
        key = hashlib.sha256(f"{backend} {job.handle.to_json()}".encode()).hexdigest()
        url = console_url({"backend": backend, "data": job.handle.data})
        fields = {
            "backend": backend,
            "credential": credential,
            "launch_key": clean_text(job.handle.launch_key, 80),
            "url": url if len(url) <= URL_LENGTH else "",
            "reason": job.why,
            "attempt": job.attempt,
            "seen_at": now,
        }
        ended_at = job.attempt.ended_at if job.attempt else None
        first = {"first_seen_at": now, "billed_from": ended_at or now}
        OrphanJob.objects.update_or_create(key=key, defaults=fields, create_defaults=fields | first)
        kept.append(key)
    OrphanJob.objects.filter(backend=backend, credential=credential).exclude(key__in=kept).delete()


def forget_orphans(now: datetime) -> None:
    """Delete stored jobs of accounts that have not been listed for a day."""
    OrphanJob.objects.filter(seen_at__lt=now - FORGET_AFTER).delete()


def _seen_before(backend: str, handle: ReplicaHandle) -> bool:
    """Remember the job; return True from the second call on."""
    key = f"archipelago:unwanted:{backend}:{handle.to_json()}"
    return not live_stream.client().set(key, "1", nx=True, ex=SEEN_FOR_S)


def _report(backend: str, job: UnwantedJob, *, done: str = "") -> None:
    by_policy = "cancelled" if settings.REAPER_POLICY == "cancel" else "left alone by policy"
    done = done or by_policy
    message = f"{backend} runs {job.handle.launch_key}, but {job.why}: {done}"
    logger.warning("%s", message)
    run = job.attempt.replica.run if job.attempt else _run_of(job.handle.launch_key)
    if run is not None:
        replica = job.attempt.replica if job.attempt else None
        record_event(run, "reaper", message, level="warning", replica=replica)


def _run_of(launch_key: str) -> Run | None:
    """The run that the launch key belongs to, if it still exists."""
    start = launch_key.partition("-")[0]
    if len(start) != 12:
        return None
    return Run.objects.filter(pk__startswith=f"{start[:8]}-{start[8:12]}").first()
