"""Reset the circuit breakers of a backend's account."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Q

from runs import audit
from runs.backends import circuit_breaker, shared_breakers
from runs.models import Credential, ReplicaPool, Run
from runs.states import RUN_ACTIVE
from runs.task_queue import enqueue
from runs.transitions import record_event


def reset_account(backend: str, credential: Credential | None, *, actor: User) -> int:
    """Close the breakers of the account's pools in active runs, so that they launch at once.
    Returns the number of pools whose breaker was not closed.

    Limits of prices and budgets are unaffected.
    """
    pools = ReplicaPool.objects.filter(
        Q(requires_intervention=True) | Q(failures__gt=0) | Q(open_until__isnull=False),
        backend=backend,
        credential=credential,
        run__state__in=sorted(RUN_ACTIVE),
    ).select_related("run")
    account = credential.name if credential else "the server's environment"
    with transaction.atomic():
        changed = list(pools)
        for pool in changed:
            circuit_breaker.reset(pool)
        for run in {pool.run_id: pool.run for pool in changed}.values():
            _record(run, f"{backend} ({account}): launches reset by {actor}", actor)
        audit.record(
            "backend.reset",
            actor=actor,
            target=f"{backend}, {account}",
            detail=f"{len(changed)} pools",
        )
    shared_breakers.answered(shared_breakers.place_of(backend, credential))
    return len(changed)


def _record(run: Run, message: str, actor: User) -> None:
    record_event(run, "breaker", message, actor=actor)
    enqueue("reconcile_run", str(run.pk))
