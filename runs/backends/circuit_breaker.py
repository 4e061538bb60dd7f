"""The circuit breaker of a pool: stop launching while its backend keeps failing.

After :data:`FAILURES` consecutive failed launches the breaker opens, and nothing is launched in the
pool for :func:`open_for_s`. Then it is half-open: one replica is launched, and one success closes
it. If a failure needs an operator (a credential, a quota), the breaker stays open until an operator
changes or successfully tests the credential, or requests a restart.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db.models import F, Q
from django.utils import timezone

from executors.launching import RETRY_AFTER_CAP_S
from runs.bulk import update_row
from runs.models import Credential, ReplicaPool, Run
from runs.redaction import clean_text
from runs.states import ReplicaState
from runs.times import due, is_due
from runs.transitions import record_event

FAILURES = 3
OPEN_S = 30.0
OPEN_CAP_S = 900.0
CAPACITY_RETRY_S = 60.0
LONGEST = timedelta(seconds=RETRY_AFTER_CAP_S)
"""A breaker is never open for longer, whatever delay the backend requests."""


def open_for_s(failures: int) -> float:
    """How long the breaker is open after consecutive failures, in seconds; 0 below the limit."""
    if failures < FAILURES:
        return 0.0
    return float(min(OPEN_S * 2 ** (failures - FAILURES), OPEN_CAP_S))


def is_open(pool: ReplicaPool, now: datetime) -> bool:
    """Whether the breaker is open: nothing is launched, and launches in progress are suspended."""
    return pool.requires_intervention or not is_due(pool.open_until, LONGEST, now)


def can_launch(pool: ReplicaPool, now: datetime) -> bool:
    """Whether the pool can launch one more replica; only one at a time while half-open."""
    if is_open(pool, now):
        return False
    if pool.failures < FAILURES:
        return True
    return not pool.replicas.filter(state=ReplicaState.PROVISIONING).exists()


def count_failure(pool: ReplicaPool, message: str, *, after_s: float | None = None) -> None:
    """Count a failed launch, or a job that died before it trained.

    ``after_s`` is the delay that the backend requested. Replicas that were launched together fail
    together, so failures do not count while the breaker is open.
    """
    now = timezone.now()
    is_counted = due("open_until", LONGEST, now)
    counted = ReplicaPool.objects.filter(is_counted, pk=pool.pk).update(
        failures=F("failures") + 1, last_error=clean_text(message)
    )
    pool.refresh_from_db(fields=("failures", "last_error", "open_until"))
    wait_s = max(open_for_s(pool.failures) if counted else 0.0, after_s or 0.0)
    until = now + timedelta(seconds=wait_s)
    waits = not is_due(pool.open_until, LONGEST, now)
    if not wait_s or (waits and pool.open_until is not None and pool.open_until >= until):
        return
    update_row(pool, open_until=until)
    record_event(
        _run(pool),
        "breaker",
        f"{pool}: {pool.failures} failures in a row, nothing is launched for {wait_s:.0f} s: "
        f"{message}",
        level="warning",
    )


def wait_for_capacity(pool: ReplicaPool, message: str, *, after_s: float | None = None) -> None:
    """Retry in a minute, because the backend has no capacity. This does not count as a failure.

    ``after_s`` is the delay that the backend requested.
    """
    now, message = timezone.now(), clean_text(message)
    until = now + timedelta(seconds=max(CAPACITY_RETRY_S, after_s or 0.0))
    is_counted = due("open_until", LONGEST, now)
    ReplicaPool.objects.filter(is_counted, pk=pool.pk).update(open_until=until)
    if (
        ReplicaPool.objects.filter(pk=pool.pk)
        .exclude(last_error=message)
        .update(last_error=message)
    ):
        record_event(_run(pool), "breaker", f"{pool}: waits for capacity: {message}")
    pool.refresh_from_db(fields=("last_error", "open_until"))


def count_success(pool: ReplicaPool) -> None:
    """Close the breaker: a replica of the pool trains."""
    changed = (
        ReplicaPool.objects.filter(pk=pool.pk)
        .exclude(failures=0, requires_intervention=False)
        .update(failures=0, open_until=None, requires_intervention=False, last_error="")
    )
    if changed and (pool.failures >= FAILURES or pool.requires_intervention):
        record_event(_run(pool), "breaker", f"{pool}: works again")
    pool.failures, pool.open_until, pool.requires_intervention, pool.last_error = 0, None, False, ""


def require_intervention(pool: ReplicaPool, message: str) -> None:
    """Open the breaker until an operator acts; record that once."""
    message = clean_text(message)
    if ReplicaPool.objects.filter(pk=pool.pk, requires_intervention=False).update(
        requires_intervention=True, last_error=message
    ):
        record_event(
            _run(pool),
            "breaker",
            f"{pool}: action required, nothing is launched: {message}",
            level="error",
        )
    pool.requires_intervention, pool.last_error = True, message


def reset_for_credential(backend: str, credential: Credential | None) -> int:
    """Close the breakers of pools that waited for a credential of their backend or bucket.

    Called after an operator changed or successfully tested it. Returns the number of pools.
    """
    affected = Q(backend=backend, credential=credential)
    if credential is not None:
        affected |= Q(run__store_credential=credential)
    return ReplicaPool.objects.filter(affected, requires_intervention=True).update(
        requires_intervention=False, failures=0, open_until=None
    )


def reset(pool: ReplicaPool) -> None:
    """Close the breaker, because an operator requested a launch."""
    ReplicaPool.objects.filter(pk=pool.pk).update(
        requires_intervention=False, failures=0, open_until=None
    )


def _run(pool: ReplicaPool) -> Run:
    return Run.objects.get(pk=pool.run_id)
