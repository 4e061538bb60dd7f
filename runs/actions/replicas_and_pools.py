"""Actions on replicas and pools: stop a run, scale it, stop or restart one replica.

An action writes the desired state into the database and returns; workers carry it out. Nothing here
calls a backend or the bucket. The caller checks permissions (:func:`runs.permissions.can_operate`).
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Sum
from django.utils import timezone

from runs.backends import budgets, circuit_breaker, prices
from runs.credentials.restrictions import refused_by_credential
from runs.exceptions import ActionRefused, IllegalTransition, InvalidRun
from runs.local_access import refused_local
from runs.models import Replica, ReplicaPool, Run, money
from runs.reconcile import retry_policy
from runs.states import (
    REPLICA_WORKING,
    RUN_ENDED,
    RUN_LIVE,
    RUN_TRANSITIONS,
    ReplicaState,
    RunState,
)
from runs.submit.create import add_replicas, store_pool
from runs.submit.pool_check import POOL_LIMIT, check_pool, pool_price
from runs.submit.run_draft import PoolDraft
from runs.task_queue import enqueue
from runs.transitions import record_event, transition, transition_replica


def request_stop(run: Run, *, actor: User | None, reason: str = "") -> bool:
    """End the run at its newest committed round; False if it is ending or has ended.

    ``actor`` None is the control plane, which must give a ``reason``.
    """
    reason = reason or f"stopped by {actor}"
    while run.state not in RUN_ENDED and RunState.STOPPING in RUN_TRANSITIONS[RunState(run.state)]:
        with transaction.atomic():
            if transition(run, RunState.STOPPING, reason=reason, actor=actor):
                enqueue("reconcile_run", str(run.pk))
                return True
    return False


def stop_replica(replica: Replica, *, actor: User, force: bool = False) -> bool:
    """Drain the replica until it is restarted: it contributes its local steps first, unless
    ``force`` or unless that takes too long. False if it has ended.

    Raises :class:`IllegalTransition` if the replica cannot be stopped in its state.
    """
    reason = f"{'ended' if force else 'stopped'} by {actor}"
    with transaction.atomic():
        moved = _drain(replica, reason=reason, actor=actor, force=force)
        if moved:
            enqueue("reconcile_run", str(replica.run_id))
    return moved


def restart_replica(replica: Replica, *, actor: User, force: bool = False) -> bool:
    """End the replica's job, if any, as :func:`stop_replica` does, and launch the same identity as
    a new attempt.

    Raises :class:`IllegalTransition` if the run has ended or the replica cannot be restarted, and
    :class:`ActionRefused` if a budget is spent.
    """
    run = Run.objects.get(pk=replica.run_id)
    if run.state in RUN_ENDED | {RunState.STOPPING, RunState.PAUSING, RunState.PAUSED}:
        raise IllegalTransition(
            f"{replica} of a run that is {run.state}", replica.state, "restarting"
        )
    if replica.state == ReplicaState.DONE:
        raise IllegalTransition(str(replica), replica.state, "restarting")
    if refusal := budgets.refusal_of(run, timezone.now()):
        raise ActionRefused(f"expected a budget that allows launches, found: {refusal}")
    with transaction.atomic():
        # The operator has intervened: reset earlier failures.
        circuit_breaker.reset(replica.pool)
        moved = _relaunch_now(replica) or transition_replica(
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


def _relaunch_now(replica: Replica) -> bool:
    """Skip the delay of a restart that is already scheduled."""
    return bool(
        Replica.objects.filter(pk=replica.pk, state=ReplicaState.RESTARTING).update(
            relaunch_at=timezone.now(), restarts=0
        )
    )


def scale_pool(pool: ReplicaPool, count: int, *, actor: User) -> int:
    """Resize the pool to ``count`` replicas; return the change in size.

    Growing reuses ended identities before it creates new ones: numbers are never reused otherwise,
    and ``max_replicas`` bounds them, because the data is sharded by that number. When shrinking,
    idle replicas leave first, then the youngest. Raises :class:`InvalidRun`.
    """
    with transaction.atomic():
        run = Run.objects.select_for_update().get(pk=pool.run_id)
        pool = ReplicaPool.objects.select_for_update().get(pk=pool.pk)
        pool.run = run
        if run.state not in RUN_LIVE | {RunState.PROVISIONING}:
            raise InvalidRun("pools", f"expected a run that is working, found one {run.state}")
        if not 0 <= count <= POOL_LIMIT:
            raise InvalidRun("pools", f"expected 0 to {POOL_LIMIT} replicas, found {count}")
        quorum = run.settings.min_quorum
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
            refused = refused or budgets.refusal_of(run, timezone.now())
            if problem := refused or refused_by_credential(pool):
                raise InvalidRun("pools", problem)
            _grow(pool, count - len(staying), actor=actor)
        for replica in sorted(staying, key=_first_to_leave)[: max(len(staying) - count, 0)]:
            replica.run = run
            _drain(replica, reason=f"{pool} scaled to {count}", actor=actor)
        ReplicaPool.objects.filter(pk=pool.pk).update(count=count)
        if count != before:
            record_event(
                run, "scaled", f"{pool.backend} {pool.hardware}: {before} to {count}", actor=actor
            )
            enqueue("reconcile_run", str(run.pk))
    return count - before


def limit_price(pool: ReplicaPool, limit_usd_h: float | None, *, actor: User) -> bool:
    """Limit the hourly price of the pool's future launches; None means no limit. False if nothing
    changed. Running jobs are not ended. Raises :class:`InvalidRun`."""
    if limit_usd_h is not None and not money.is_price(limit_usd_h):
        raise InvalidRun(
            "pools.0.max_price_usd_h", f"expected {money.EXPECTED_PRICE}, found {limit_usd_h}"
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
            run,
            prices.KIND,
            f"{pool}: max price {_money(old)}, now {_money(limit_usd_h)}",
            actor=actor,
        )
        enqueue("reconcile_run", str(run.pk))
    return True


def _money(limit_usd_h: float | None) -> str:
    return "none" if limit_usd_h is None else f"${limit_usd_h:g} an hour"


def add_pool(run: Run, draft: PoolDraft, *, actor: User) -> ReplicaPool:
    """Add a pool to an active run. Raises :class:`InvalidRun`."""
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
        if refusal := budgets.refusal_of(run, timezone.now()):
            raise InvalidRun("pools", refusal)
        _check_room(run, draft.count)
        pool = store_pool(run, draft, actor=actor)
        record_event(run, "scaled", f"{pool} added", actor=actor)
        enqueue("reconcile_run", str(run.pk))
    return pool


def _stays(replica: Replica) -> bool:
    """Whether the replica counts towards its pool: working, launching, or waiting to relaunch."""
    return replica.state != ReplicaState.DRAINING and not replica.ended


_CAN_RETURN = (
    ReplicaState.EVICTED,
    ReplicaState.LOST,
    ReplicaState.FAILED,
    ReplicaState.DRAINING,  # after its job has ended
)


def _first_to_leave(replica: Replica) -> tuple[bool, int]:
    return replica.state in REPLICA_WORKING, -replica.number


def _grow(pool: ReplicaPool, more: int, *, actor: User) -> None:
    candidates = pool.replicas.filter(state__in=_CAN_RETURN).order_by("number")
    returning = sorted(candidates, key=lambda replica: not replica.ended)[:more]
    for replica in returning:
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
    new = more - len(returning)
    _check_room(pool.run, new)
    add_replicas(pool, new, now=timezone.now())


def _check_room(run: Run, more: int) -> None:
    limit, count = int(run.group_settings["max_replicas"]), run.replicas.count() + more
    if count > limit:
        raise InvalidRun(
            "pools",
            f"expected at most {limit} replicas over the run's life (max_replicas), found {count}",
        )


def _drain(replica: Replica, *, reason: str, actor: User | None, force: bool = False) -> bool:
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
    """When its job is ended if it does not exit: immediately if it never began to work."""
    now = timezone.now()
    if force or replica.worked_since is None:
        return now
    return now + timedelta(seconds=retry_policy.drain_s(run.round_s))
