"""Operator actions: stop a run, stop and restart its replicas, scale and add pools."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router, Status
from pydantic import Field

from archipelago import rows as shared
from dashboard.access import replica_or_404
from dashboard.api.auth import OPERATORS, pool_of, run_to_operate
from dashboard.api.document import PoolDocument, pool_draft
from dashboard.api.problems import Invalid, at
from dashboard.api.types import NO_NUL, Body, Number, RowId, RunId, done, responses
from runs.actions import lifecycle, replicas_and_pools
from runs.queries import fleet
from runs.submit import pool_check, preflight

router = Router(tags=["actions"])


class Stop(Body):
    """``reason`` is shown in the run's events. ``force`` ends the jobs immediately: work since the
    last round and the final weights can be lost."""

    reason: Annotated[str, Field(max_length=500, pattern=NO_NUL)] = ""
    force: bool = False


class Leave(Body):
    """``force`` ends the job immediately; otherwise the replica can first contribute its work."""

    force: bool = False


class Scale(Body):
    """``max_price_usd_h`` is the highest price per replica and hour, from its next launch on. Null
    removes the limit; if left out, the limit does not change."""

    count: Annotated[int, Field(ge=0, le=pool_check.POOL_LIMIT)]
    max_price_usd_h: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


@router.post("/runs/{uuid:run_id}/stop", auth=OPERATORS, response=responses(shared.Done))
def stop_run(request: HttpRequest, run_id: RunId, body: Stop | None = None) -> Any:
    """Stop the run at its newest committed round and export its weights."""
    run, user = run_to_operate(request, run_id)
    if body is not None and body.force:
        changed = lifecycle.force_stop(run, actor=user)
    else:
        changed = replicas_and_pools.request_stop(
            run, actor=user, reason=body.reason if body else ""
        )
    return done(run, changed)


@router.post(
    "/runs/{uuid:run_id}/replicas/{int:number}/stop",
    auth=OPERATORS,
    response=responses(shared.Done),
)
def stop_replica(
    request: HttpRequest, run_id: RunId, number: Number, body: Leave | None = None
) -> Any:
    """Drain the replica. It does not restart."""
    run, user = run_to_operate(request, run_id)
    replica = replica_or_404(run, number)
    changed = replicas_and_pools.stop_replica(replica, actor=user, force=bool(body and body.force))
    return done(replica, changed)


@router.post(
    "/runs/{uuid:run_id}/replicas/{int:number}/restart",
    auth=OPERATORS,
    response=responses(shared.Done),
)
def restart_replica(
    request: HttpRequest, run_id: RunId, number: Number, body: Leave | None = None
) -> Any:
    """End the replica's job, if it has one, and launch a new one for the same replica."""
    run, user = run_to_operate(request, run_id)
    replica = replica_or_404(run, number)
    changed = replicas_and_pools.restart_replica(
        replica, actor=user, force=bool(body and body.force)
    )
    return done(replica, changed)


@router.post(
    "/runs/{uuid:run_id}/pools/{int:pool_id}/scale",
    auth=OPERATORS,
    response=responses(shared.Scaled),
)
def scale_pool(request: HttpRequest, run_id: RunId, pool_id: RowId, body: Scale) -> Any:
    """Set the number of replicas of the pool to ``count``."""
    run, user = run_to_operate(request, run_id)
    pool = pool_of(run, pool_id)
    if "max_price_usd_h" in body.model_fields_set:
        replicas_and_pools.limit_price(pool, body.max_price_usd_h, actor=user)
    change = replicas_and_pools.scale_pool(pool, body.count, actor=user)
    return {"change": change, "wanted": body.count}


@router.post(
    "/runs/{uuid:run_id}/pools", auth=OPERATORS, response=responses(shared.Pool, status=201)
)
def add_pool(request: HttpRequest, run_id: RunId, pool: PoolDocument) -> Any:
    """Add a pool to an active run. Its backend is checked first."""
    run, user = run_to_operate(request, run_id)
    draft = pool_draft(pool)
    if problems := preflight.check_new_pool(run, draft):
        raise Invalid(at(each.field, each.message) for each in problems)
    added = replicas_and_pools.add_pool(run, draft, actor=user)
    row = next(row for row in fleet.pool_rows(run) if row["id"] == added.pk)
    return Status(201, row)
