"""The circuit breaker of a pool: a backend that fails again and again is left alone for a while.

After :data:`FAILURES` launches in a row that failed, nothing is launched in the pool for
:func:`closed_for_s`; then one replica is tried, and the first that works closes the matter.
Where only a person can help (a credential, a quota), nothing is launched until one has acted:
the credential was tested well or changed, or somebody asked for a restart.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db.models import F, Q
from django.utils import timezone

from executors.launching import RETRY_AFTER_CAP_S
from runs.models import Credential, ReplicaPool, Run
from runs.states import ReplicaState
from runs.times import due, is_due
from runs.transitions import clean_text, record_event

FAILURES = 3
CLOSED_S = 30.0
CLOSED_CAP_S = 900.0
CAPACITY_RETRY_S = 60.0
LONGEST = timedelta(seconds=RETRY_AFTER_CAP_S)
"""No pool is left alone for longer, whatever the backend asks for."""


def closed_for_s(failures: int) -> float:
    """How long after that many failures in a row; 0 below the limit."""
    if failures < FAILURES:
        return 0.0
    return float(min(CLOSED_S * 2 ** (failures - FAILURES), CLOSED_CAP_S))


def is_closed(pool: ReplicaPool, now: datetime) -> bool:
    """Whether its backend is left alone, also with a launch that was begun: it asked for that, or
    has failed too often."""
    return pool.needs_person or not is_due(pool.closed_until, LONGEST, now)


def may_launch(pool: ReplicaPool, now: datetime) -> bool:
    """Whether the pool may launch one more: after too many failures one at a time."""
    if is_closed(pool, now):
        return False
    if pool.failures < FAILURES:
        return True
    return not pool.replicas.filter(state=ReplicaState.PROVISIONING).exists()


def count_failure(pool: ReplicaPool, message: str, *, after_s: float | None = None) -> None:
    """A launch failed, or a job died before it worked. ``after_s``: what the backend asked for.

    What was launched together fails together: while the pool is closed a failure says nothing new.
    """
    now = timezone.now()
    is_open = due("closed_until", LONGEST, now)
    counted = ReplicaPool.objects.filter(is_open, pk=pool.pk).update(
        failures=F("failures") + 1, trouble=clean_text(message)
    )
    pool.refresh_from_db(fields=("failures", "trouble", "closed_until"))
    wait_s = max(closed_for_s(pool.failures) if counted else 0.0, after_s or 0.0)
    until = now + timedelta(seconds=wait_s)
    waits = not is_due(pool.closed_until, LONGEST, now)
    if not wait_s or (waits and pool.closed_until is not None and pool.closed_until >= until):
        return
    ReplicaPool.objects.filter(pk=pool.pk).update(closed_until=until)
    pool.closed_until = until
    record_event(
        _run(pool),
        "breaker",
        f"{pool}: {pool.failures} failures in a row, nothing is launched for {wait_s:.0f} s: "
        f"{message}",
        level="warning",
    )


def wait_for_capacity(pool: ReplicaPool, message: str, *, after_s: float | None = None) -> None:
    """The backend is full, which is no failure of it: the pool tries again in a minute, however
    often that has happened. ``after_s``: what the backend asked for."""
    now, message = timezone.now(), clean_text(message)
    until = now + timedelta(seconds=max(CAPACITY_RETRY_S, after_s or 0.0))
    is_open = due("closed_until", LONGEST, now)
    ReplicaPool.objects.filter(is_open, pk=pool.pk).update(closed_until=until)
    if ReplicaPool.objects.filter(pk=pool.pk).exclude(trouble=message).update(trouble=message):
        record_event(_run(pool), "breaker", f"{pool}: waits for capacity: {message}")
    pool.refresh_from_db(fields=("trouble", "closed_until"))


def count_success(pool: ReplicaPool) -> None:
    """A replica of the pool works."""
    moved = (
        ReplicaPool.objects.filter(pk=pool.pk)
        .exclude(failures=0, needs_person=False)
        .update(failures=0, closed_until=None, needs_person=False, trouble="")
    )
    if moved and (pool.failures >= FAILURES or pool.needs_person):
        record_event(_run(pool), "breaker", f"{pool}: works again")
    pool.failures, pool.closed_until, pool.needs_person, pool.trouble = 0, None, False, ""


def call_person(pool: ReplicaPool, message: str) -> None:
    """Only somebody who acts can help; said once."""
    message = clean_text(message)
    if ReplicaPool.objects.filter(pk=pool.pk, needs_person=False).update(
        needs_person=True, trouble=message
    ):
        record_event(
            _run(pool),
            "breaker",
            f"{pool}: nothing is launched until somebody acts: {message}",
            level="error",
        )
    pool.needs_person, pool.trouble = True, message


def person_acted(backend: str, credential: Credential | None) -> int:
    """Somebody changed or proved a credential, of a backend or of a bucket: the pools that waited
    for it may go on. Returns how many."""
    concerned = Q(backend=backend, credential=credential)
    if credential is not None:
        concerned |= Q(run__store_credential=credential)
    return ReplicaPool.objects.filter(concerned, needs_person=True).update(
        needs_person=False, failures=0, closed_until=None
    )


def person_looked(pool: ReplicaPool) -> None:
    """Somebody asked for a launch: it is tried, whatever was."""
    ReplicaPool.objects.filter(pk=pool.pk).update(needs_person=False, failures=0, closed_until=None)


def _run(pool: ReplicaPool) -> Run:
    return Run.objects.get(pk=pool.run_id)
