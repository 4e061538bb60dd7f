"""What people can do to runs: create, stop, scale, stop or restart one replica.

A service writes what is wanted into the database and returns; workers carry it out. Nothing here
calls a backend or the bucket. Who may do what is :func:`runs.permissions.may_operate`, asked by the
caller.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Sum
from django.utils import timezone

from runs.backends import circuit_breaker, prices
from runs.credentials.restrictions import refused_by_credential
from runs.exceptions import IllegalTransition, InvalidRun
from runs.local_access import refused_local
from runs.models import Replica, ReplicaPool, Run
from runs.reconcile import retry_policy
from runs.states import (
    REPLICA_WORKING,
    RUN_ENDED,
    RUN_LIVE,
    RUN_TRANSITIONS,
    ReplicaState,
    RunState,
)
from runs.submit.create import (
    POOL_LIMIT,
    add_replicas,
    check_pool,
    create_run,
    pool_price,
    store_pool,
)
from runs.submit.run_draft import PoolDraft
from runs.task_queue import enqueue
from runs.transitions import record_event, transition, transition_replica

__all__ = [
    "add_pool",
    "create_run",
    "limit_price",
    "request_stop",
    "restart_replica",
    "scale_pool",
    "stop_replica",
    "transition",
    "transition_replica",
]


def request_stop(run: Run, *, actor: User | None, reason: str = "") -> bool:
    """Ask the run to end at its newest committed round; False if it is ending or over already.

    ``actor`` None is the control plane itself, which must give its ``reason``.
    """
    reason = reason or f"stopped by {actor}"
    while run.state not in RUN_ENDED and RunState.STOPPING in RUN_TRANSITIONS[RunState(run.state)]:
        with transaction.atomic():
            if transition(run, RunState.STOPPING, reason=reason, actor=actor):
                enqueue("reconcile_run", str(run.pk))
                return True
    return False


def stop_replica(replica: Replica, *, actor: User, force: bool = False) -> bool:
    """Let the replica leave for good (until restarted): it gives its work to a round first, unless
    ``force`` or unless it takes too long. False if it is over already.

    Raises :class:`IllegalTransition` when the replica cannot be stopped in the state it is in.
    """
    words = f"{'ended' if force else 'stopped'} by {actor}"
    with transaction.atomic():
        moved = _let_leave(replica, reason=words, actor=actor, force=force)
        if moved:
            enqueue("reconcile_run", str(replica.run_id))
    return moved


def restart_replica(replica: Replica, *, actor: User, force: bool = False) -> bool:
    """End the replica's job, if it has one, as :func:`stop_replica` does, and launch the same
    identity as a new attempt.

    Raises :class:`IllegalTransition` when the run is over or the replica cannot be restarted.
    """
    run = Run.objects.get(pk=replica.run_id)
    if run.state in RUN_ENDED | {RunState.STOPPING, RunState.PAUSING, RunState.PAUSED}:
        raise IllegalTransition(
            f"{replica} of a run that is {run.state}", replica.state, "restarting"
        )
    if replica.state == ReplicaState.DONE:
        raise IllegalTransition(str(replica), replica.state, "restarting")
    with transaction.atomic():
        # Somebody looked at it: what went wrong before is not held against it.
        circuit_breaker.person_looked(replica.pool)
        moved = _hurry(replica) or transition_replica(
            replica,
            ReplicaState.RESTARTING,
            reason=f"restarted by {actor}",
            actor=actor,
            restarts=0,
            relaunch_at=timezone.now(),
            fell_at=None,
            cancel_at=_cancel_at(replica, run, force=force),
        )
        if moved:
            enqueue("reconcile_run", str(replica.run_id))
    return moved


def _hurry(replica: Replica) -> bool:
    """A restart that was waiting for its time waits no longer."""
    return bool(
        Replica.objects.filter(pk=replica.pk, state=ReplicaState.RESTARTING).update(
            relaunch_at=timezone.now(), restarts=0
        )
    )


def scale_pool(pool: ReplicaPool, count: int, *, actor: User) -> int:
    """Make the pool ``count`` replicas large; how many more (or, below 0, fewer) it has now.

    New ones take up identities that have left before making new ones: these are numbered for ever,
    and the group's ``max_replicas`` bounds their number, because the data is shared out among so
    many. Those that leave are first who does not work, then the youngest. Raises
    :class:`InvalidRun`.
    """
    with transaction.atomic():
        run = Run.objects.select_for_update().get(pk=pool.run_id)
        pool = ReplicaPool.objects.select_for_update().get(pk=pool.pk)
        pool.run = run
        if run.state not in RUN_LIVE | {RunState.PROVISIONING}:
            raise InvalidRun("pools", f"expected a run that is working, found one {run.state}")
        if not 0 <= count <= POOL_LIMIT:
            raise InvalidRun("pools", f"expected 0 to {POOL_LIMIT} replicas, found {count}")
        quorum = int(run.group_settings["min_quorum"])
        others = run.pools.exclude(pk=pool.pk).aggregate(n=Sum("count"))["n"] or 0
        if count + others < quorum:
            raise InvalidRun(
                "pools",
                f"expected at least the quorum of {quorum} replicas in all, found {count + others}",
            )
        before = pool.count
        staying = [r for r in pool.replicas.order_by("number") if _stays(r)]
        if count > len(staying):
            refused = refused_local(actor, pool.backend, run.workload)
            if problem := refused or refused_by_credential(pool):
                raise InvalidRun("pools", problem)
            _grow(pool, count - len(staying), actor=actor)
        for replica in sorted(staying, key=_first_to_leave)[: max(len(staying) - count, 0)]:
            replica.run = run
            _let_leave(replica, reason=f"{pool} scaled to {count}", actor=actor)
        ReplicaPool.objects.filter(pk=pool.pk).update(count=count)
        if count != before:
            record_event(
                run, "scaled", f"{pool.backend} {pool.hardware}: {before} to {count}", actor=actor
            )
            enqueue("reconcile_run", str(run.pk))
    return count - before


def limit_price(pool: ReplicaPool, limit_usd_h: float | None, *, actor: User) -> bool:
    """What a replica of the pool may cost at most in an hour from its next launch on, None for
    anything; False where it was so. Nothing that runs is ended. Raises :class:`InvalidRun`."""
    if limit_usd_h is not None and not 0 <= limit_usd_h < float("inf"):
        raise InvalidRun(
            "pools.0.max_price_usd_h", f"expected 0 or more USD per hour, found {limit_usd_h}"
        )
    with transaction.atomic():
        run = Run.objects.select_for_update().get(pk=pool.run_id)
        if run.state in RUN_ENDED | {RunState.STOPPING}:
            raise InvalidRun("pools", f"expected a run that is not over, found one {run.state}")
        old = ReplicaPool.objects.get(pk=pool.pk).max_price_usd_h
        if old == limit_usd_h:
            return False
        ReplicaPool.objects.filter(pk=pool.pk).update(max_price_usd_h=limit_usd_h)
        pool.max_price_usd_h = limit_usd_h
        record_event(
            run, prices.KIND, f"{pool}: max price {_money(old)}, now {_money(limit_usd_h)}",
            actor=actor,
        )  # fmt: skip
        enqueue("reconcile_run", str(run.pk))
    return True


def _money(limit_usd_h: float | None) -> str:
    return "none" if limit_usd_h is None else f"${limit_usd_h:g} an hour"


def add_pool(run: Run, draft: PoolDraft, *, actor: User) -> ReplicaPool:
    """One more pool for a run that is working. Raises :class:`InvalidRun`."""
    check_pool(draft)
    if problem := refused_local(actor, draft.backend, run.workload):
        raise InvalidRun("pools.0.backend", problem)
    with transaction.atomic():
        run = Run.objects.select_for_update().get(pk=run.pk)
        if run.state not in RUN_LIVE | {RunState.PROVISIONING}:
            raise InvalidRun("pools", f"expected a run that is working, found one {run.state}")
        if run.budget_usd and pool_price(draft) is None:
            raise InvalidRun(
                "pools.0.price_usd_h", "expected a price, because the run has a budget, found none"
            )
        _check_room(run, draft.count)
        pool = store_pool(run, draft, actor=actor)
        record_event(run, "scaled", f"{pool} added", actor=actor)
        enqueue("reconcile_run", str(run.pk))
    return pool


def _stays(replica: Replica) -> bool:
    """Counts towards its pool: at work, on its way, or waiting for its next attempt."""
    return replica.state != ReplicaState.DRAINING and not replica.ended


_CAN_RETURN = (
    ReplicaState.EVICTED,
    ReplicaState.LOST,
    ReplicaState.FAILED,
    ReplicaState.DRAINING,  # when its job has ended
)


def _first_to_leave(replica: Replica) -> tuple[bool, int]:
    return replica.state in REPLICA_WORKING, -replica.number


def _grow(pool: ReplicaPool, more: int, *, actor: User) -> None:
    found = pool.replicas.filter(state__in=_CAN_RETURN).order_by("number")
    gone = sorted(found, key=lambda replica: not replica.ended)[:more]
    for replica in gone:
        replica.run = pool.run
        transition_replica(
            replica,
            ReplicaState.RESTARTING,
            reason=f"{pool} scaled up",
            actor=actor,
            restarts=0,
            relaunch_at=timezone.now(),
            fell_at=None,
        )
    new = more - len(gone)
    _check_room(pool.run, new)
    add_replicas(pool, new, now=timezone.now())


def _check_room(run: Run, more: int) -> None:
    limit, found = int(run.group_settings["max_replicas"]), run.replicas.count() + more
    if found > limit:
        raise InvalidRun(
            "pools",
            f"expected at most {limit} replicas over the run's life (max_replicas), found {found}",
        )


def _let_leave(replica: Replica, *, reason: str, actor: User | None, force: bool = False) -> bool:
    if replica.state == ReplicaState.DRAINING and force:
        return bool(
            Replica.objects.filter(pk=replica.pk, state=ReplicaState.DRAINING).update(
                cancel_at=timezone.now()
            )
        )
    if replica.ended or replica.state == ReplicaState.DRAINING:
        return False
    to = (
        ReplicaState.EVICTED
        if replica.state in (ReplicaState.PENDING, ReplicaState.RESTARTING)
        else ReplicaState.DRAINING
    )
    return transition_replica(
        replica,
        to,
        reason=reason,
        actor=actor,
        cancel_at=_cancel_at(replica, replica.run, force=force),
    )


def _cancel_at(replica: Replica, run: Run, *, force: bool) -> datetime:
    """When its job is ended if it has not left: at once for one that never began to work."""
    now = timezone.now()
    if force or replica.worked_since is None:
        return now
    return now + timedelta(seconds=retry_policy.drain_s(run.round_s))
