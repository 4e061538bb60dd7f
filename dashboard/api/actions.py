"""What operators do: stop a run, stop and restart its replicas, scale its pools and add one."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router, Status
from pydantic import BaseModel, ConfigDict, Field

from dashboard.api import rows
from dashboard.api.auth import OPERATORS, pool_of, replica_of, run_to_operate
from dashboard.api.document import PoolDocument, pool_draft
from dashboard.api.problems import Invalid, at
from dashboard.api.types import NO_NUL, Number, PoolId, RunId, responses
from runs.actions import lifecycle, replicas_and_pools
from runs.queries import fleet
from runs.submit import create, preflight

router = Router(tags=["actions"])


class Stop(BaseModel):
    """``reason`` is written into the run's events. ``force`` ends its jobs at once: work since the
    last round, and final weights, may be lost."""

    model_config = ConfigDict(extra="forbid", strict=True)

    reason: Annotated[str, Field(max_length=500, pattern=NO_NUL)] = ""
    force: bool = False


class Leave(BaseModel):
    """``force`` ends the job at once; otherwise the replica may give its work to a round first."""

    model_config = ConfigDict(extra="forbid", strict=True)

    force: bool = False


class Scale(BaseModel):
    """``max_price_usd_h`` is what a replica may cost at most in an hour from its next launch on:
    null for anything, left out for what it was."""

    model_config = ConfigDict(extra="forbid", strict=True)

    count: Annotated[int, Field(ge=0, le=create.POOL_LIMIT)]
    max_price_usd_h: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


@router.post("/runs/{uuid:run_id}/stop", auth=OPERATORS, response=responses(rows.Done))
def stop_run(request: HttpRequest, run_id: RunId, body: Stop | None = None) -> Any:
    """End the run at its newest committed round, and keep its weights."""
    run, user = run_to_operate(request, run_id)
    if body is not None and body.force:
        changed = lifecycle.force_stop(run, actor=user)
    else:
        changed = replicas_and_pools.request_stop(
            run, actor=user, reason=body.reason if body else ""
        )
    run.refresh_from_db()
    return {"changed": changed, "state": run.state}


@router.post(
    "/runs/{uuid:run_id}/replicas/{int:number}/stop", auth=OPERATORS, response=responses(rows.Done)
)
def stop_replica(
    request: HttpRequest, run_id: RunId, number: Number, body: Leave | None = None
) -> Any:
    """Let the replica leave for good."""
    run, user = run_to_operate(request, run_id)
    replica = replica_of(run, number)
    changed = replicas_and_pools.stop_replica(replica, actor=user, force=bool(body and body.force))
    replica.refresh_from_db()
    return {"changed": changed, "state": replica.state}


@router.post(
    "/runs/{uuid:run_id}/replicas/{int:number}/restart",
    auth=OPERATORS,
    response=responses(rows.Done),
)
def restart_replica(
    request: HttpRequest, run_id: RunId, number: Number, body: Leave | None = None
) -> Any:
    """End the replica's job, if it has one, and launch the same identity again."""
    run, user = run_to_operate(request, run_id)
    replica = replica_of(run, number)
    changed = replicas_and_pools.restart_replica(
        replica, actor=user, force=bool(body and body.force)
    )
    replica.refresh_from_db()
    return {"changed": changed, "state": replica.state}


@router.post(
    "/runs/{uuid:run_id}/pools/{int:pool_id}/scale", auth=OPERATORS, response=responses(rows.Scaled)
)
def scale_pool(request: HttpRequest, run_id: RunId, pool_id: PoolId, body: Scale) -> Any:
    """Make the pool ``count`` replicas large."""
    run, user = run_to_operate(request, run_id)
    pool = pool_of(run, pool_id)
    if "max_price_usd_h" in body.model_fields_set:
        replicas_and_pools.limit_price(pool, body.max_price_usd_h, actor=user)
    change = replicas_and_pools.scale_pool(pool, body.count, actor=user)
    return {"change": change, "wanted": body.count}


@router.post("/runs/{uuid:run_id}/pools", auth=OPERATORS, response=responses(rows.Pool, status=201))
def add_pool(request: HttpRequest, run_id: RunId, pool: PoolDocument) -> Any:
    """One more pool for a run that is working; its backend is asked first."""
    run, user = run_to_operate(request, run_id)
    draft = pool_draft(pool)
    create.check_pool(draft)
    findings = preflight.check_new_pool(run, draft)
    if findings:
        raise Invalid(at(finding.field, finding.message) for finding in findings)
    added = replicas_and_pools.add_pool(run, draft, actor=user)
    row = next(row for row in fleet.pool_rows(run) if row["id"] == added.pk)
    return Status(201, row)
