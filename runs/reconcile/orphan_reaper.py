"""Jobs nobody knows, jobs nobody wants, and jobs that are there twice.

Every minute each account that this deployment uses is asked for its live jobs. A job is

- an *orphan* if no attempt has its launch key (the database was restored, the run deleted);
- *left over* if its attempt is closed (a launch that came through after it was called off);
- a *twin* if its attempt has another job (a backend without unique names took one launch twice).

Such a job is cancelled, or under the policy ``report`` only told of. That a job the database
counts on is gone, the other direction, is found by the reconciler's poll (cause *lost*).

Only jobs that carry this deployment's mark are looked at, and only what two looks a minute apart
have found is ended: a launch may be between *start* and *save*.
"""

from __future__ import annotations

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
from runs.backends.parallel_calls import NoAnswer, ask_all
from runs.models import Credential, ReplicaAttempt, ReplicaPool, Run
from runs.redaction import redact
from runs.transitions import record_event

logger = logging.getLogger(__name__)

SEEN_FOR_S = 600
"""How long a first sight is remembered."""
ACTIVE_WITHIN = timedelta(days=7)
"""Accounts of runs that ended longer ago are not asked any more: no backend runs a job longer."""


@dataclass(frozen=True, kw_only=True)
class Found:
    handle: ReplicaHandle
    why: str
    attempt: ReplicaAttempt | None = None


def reap() -> int:
    """One look at every account; how many jobs were told to end."""
    now = timezone.now()
    ended = 0
    looked_at: set[str] = set()  # two credentials may be of one account
    for backend, credential in accounts(now):
        try:
            executor = executor_of(backend, credential)
            handles = [h for h in executor.live() if h.to_json() not in looked_at]
            looked_at |= {handle.to_json() for handle in handles}
            suspects = unwanted(handles, twins=not executor.capabilities.unique_names)
            due = [found for found in suspects if _seen_before(backend, found.handle)]
            if settings.REAPER_POLICY == "cancel":
                executor.cancel([found.handle for found in due])
                ended += len(due)
        except ExecutorError as error:
            logger.warning("%s could not be asked for its jobs: %s", backend, error)
            continue
        for found in due:
            _tell(backend, found)
    return ended


@dataclass(frozen=True, kw_only=True)
class Sight:
    """An unwanted job, and the account that has it."""

    backend: str
    credential: Credential | None
    found: Found


def look(now: datetime) -> tuple[list[Sight], list[str]]:
    """What :func:`reap` would look at once more, for a person who looks: nothing is remembered and
    nothing is ended. Beside it what kept an account from answering within
    :data:`runs.backends.parallel_calls.PATIENCE_S`, in words."""
    asked = {
        f"{BACKENDS[backend]} with {credential or 'the server environment'}": (backend, credential)
        for backend, credential in accounts(now)
        if backend in BACKENDS  # an imported run's may be none of ours
    }

    def live_jobs(account: tuple[str, Credential | None]) -> tuple[list[ReplicaHandle], bool]:
        executor = executor_of(*account)
        return executor.live(), not executor.capabilities.unique_names

    wait_loaded({backend for backend, _ in asked.values()})
    answers = ask_all({name: partial(live_jobs, account) for name, account in asked.items()})
    sights, silent, seen = [], [], set()
    for name, answer in answers.items():
        if isinstance(answer, Exception):
            known = isinstance(answer, ExecutorError | NoAnswer)
            words = redact(str(answer)) if known else type(answer).__name__
            silent.append(f"{name} could not be asked: {words}")
            continue
        handles = [handle for handle in answer[0] if handle.to_json() not in seen]
        seen |= {handle.to_json() for handle in handles}
        backend, credential = asked[name]
        sights += [
            Sight(backend=backend, credential=credential, found=found)
            for found in unwanted(handles, twins=answer[1])
        ]
    return sights, silent


def end(sight: Sight) -> str:
    """Ask for the job's end, and tell the run it was of; what kept it from that, or ''."""
    try:
        executor_of(sight.backend, sight.credential).cancel([sight.found.handle])
    except ExecutorError as error:
        return redact(str(error))
    _tell(sight.backend, sight.found, done="ended by an administrator")
    return ""


def accounts(now: datetime) -> list[tuple[str, Credential | None]]:
    """Backend and credential of every pool that may still have jobs, and every stored credential:
    its orphans may be of runs that are gone."""
    pools = ReplicaPool.objects.exclude(run__ended_at__lt=now - ACTIVE_WITHIN)
    used = {(p.backend, p.credential) for p in pools.select_related("credential")}
    stored = {(c.kind, c) for c in Credential.objects.filter(kind__in=BACKENDS)}
    return sorted(used | stored, key=lambda account: (account[0], str(account[1] or "")))


def unwanted(handles: Iterable[ReplicaHandle], *, twins: bool) -> list[Found]:
    """``twins``: the backend may have two jobs of one launch key."""
    handles = list(handles)
    attempts = {
        attempt.launch_key: attempt
        for attempt in ReplicaAttempt.objects.filter(
            launch_key__in=[handle.launch_key for handle in handles]
        ).select_related("replica__run")
    }
    found = []
    for handle in handles:
        attempt = attempts.get(handle.launch_key)
        if attempt is None:
            found.append(Found(handle=handle, why="no attempt has its launch key"))
        elif attempt.ended_at is not None:
            found.append(Found(handle=handle, why="its attempt has ended", attempt=attempt))
        elif (
            twins
            and attempt.handle is not None
            and dict(attempt.handle["data"]) != dict(handle.data)
        ):
            found.append(Found(handle=handle, why="its attempt has another job", attempt=attempt))
    return found


def _seen_before(backend: str, handle: ReplicaHandle) -> bool:
    """Remembers the sight; True from the second on."""
    key = f"archipelago:unwanted:{backend}:{handle.to_json()}"
    return not live_stream.client().set(key, "1", nx=True, ex=SEEN_FOR_S)


def _tell(backend: str, found: Found, *, done: str = "") -> None:
    by_policy = "cancelled" if settings.REAPER_POLICY == "cancel" else "left alone by policy"
    done = done or by_policy
    message = f"{backend} runs {found.handle.launch_key}, but {found.why}: {done}"
    logger.warning("%s", message)
    run = found.attempt.replica.run if found.attempt else _run_of(found.handle.launch_key)
    if run is not None:
        replica = found.attempt.replica if found.attempt else None
        record_event(run, "reaper", message, level="warning", replica=replica)


def _run_of(launch_key: str) -> Run | None:
    """The run a launch key was made for, if it is still there."""
    start = launch_key.partition("-")[0]
    if len(start) != 12:
        return None
    return Run.objects.filter(pk__startswith=f"{start[:8]}-{start[8:12]}").first()
