"""Lifecycle of a run: pause, resume, save, archive, describe, delete, fork; and its alerts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

from django.contrib.auth.models import User
from django.db import transaction
from django.http import HttpRequest
from django.shortcuts import get_object_or_404
from ninja import Query, Router
from pydantic import Field

from archipelago import rows as shared
from dashboard.api.auth import OPERATORS, run_to_operate, run_to_see
from dashboard.api.document import document_of
from dashboard.api.types import NO_NUL, SMALL, Body, RowId, RunId, done, responses
from runs.actions import deletion, lifecycle
from runs.alerts import store as alerting
from runs.exceptions import ActionRefused
from runs.models import Run
from runs.submit import clone_and_fork
from runs.submit.tags import TAG_LENGTH, TAGS

router = Router(tags=["lifecycle"])


class Description(Body):
    """Fields that are left out do not change. Lists hide ``archived`` runs."""

    notes: Annotated[str, Field(max_length=lifecycle.NOTES_LENGTH, pattern=NO_NUL)] | None = None
    tags: (
        Annotated[
            list[Annotated[str, Field(max_length=TAG_LENGTH, pattern=NO_NUL)]],
            Field(max_length=TAGS),
        ]
        | None
    ) = None
    archived: bool | None = None


class Deletion(Body):
    """``name`` must equal the run's name, as a confirmation; ``objects``: also delete its objects
    in the bucket."""

    name: Annotated[str, Field(max_length=80, pattern=NO_NUL)]
    objects: bool = False


def _act(request: HttpRequest, run_id: Any, action: Callable[[Run, User], bool]) -> Any:
    run, user = run_to_operate(request, run_id)
    return done(run, action(run, user))


@router.post("/runs/{uuid:run_id}/pause", auth=OPERATORS, response=responses(shared.Done))
def pause_run(request: HttpRequest, run_id: RunId) -> Any:
    """Let all replicas save and exit. A paused run costs nothing."""
    return _act(request, run_id, lambda run, user: lifecycle.pause(run, actor=user))


@router.post("/runs/{uuid:run_id}/resume", auth=OPERATORS, response=responses(shared.Done))
def resume_run(request: HttpRequest, run_id: RunId) -> Any:
    """Resume a run that is paused, or that ended without final weights."""
    return _act(request, run_id, lambda run, user: lifecycle.resume(run, actor=user))


@router.post("/runs/{uuid:run_id}/save", auth=OPERATORS, response=responses(shared.Done))
def save_run(request: HttpRequest, run_id: RunId) -> Any:
    """Request a checkpoint of the next committed round."""
    return _act(request, run_id, lambda run, user: lifecycle.save(run, actor=user))


@router.post("/runs/{uuid:run_id}/describe", auth=OPERATORS, response=responses(shared.Done))
def describe_run(request: HttpRequest, run_id: RunId, body: Description) -> Any:
    """Replace notes or tags, or archive the run: all that is sent, or nothing."""

    @transaction.atomic
    def change(run: Run, user: User) -> bool:
        changed = False
        if body.archived is not None:
            changed |= lifecycle.archive(run, actor=user, archived=body.archived)
        if body.notes is not None or body.tags is not None:
            changed |= lifecycle.describe(run, notes=body.notes, tags=body.tags, actor=user)
        return changed

    return _act(request, run_id, change)


@router.post("/runs/{uuid:run_id}/delete", auth=OPERATORS, response=responses(shared.Done))
def delete_run(request: HttpRequest, run_id: RunId, body: Deletion) -> Any:
    """Delete a finished run. A worker deletes it in the background; this cannot be undone."""
    run, user = run_to_operate(request, run_id)
    lifecycle.delete(run, actor=user, name=body.name, objects=body.objects)
    return {"changed": True, "state": run.state}


@router.get("/runs/{uuid:run_id}/deletion", response=responses(shared.DeletionPlan, but=(413,)))
def plan_deletion(request: HttpRequest, run_id: RunId) -> Any:
    """The objects that a deletion with ``objects`` would delete and keep. Nothing is deleted."""
    run, _ = run_to_operate(request, run_id)
    plan = deletion.plan_deletion(run)
    return dataclasses.asdict(plan) | {"objects": plan.objects, "size_bytes": plan.size_bytes}


@router.get("/runs/{uuid:run_id}/document", response=responses(dict[str, Any], but=(413,)))
def get_document(
    request: HttpRequest,
    run_id: RunId,
    fork: Annotated[bool, Query(description="Start from its weights")] = False,
    round: Annotated[
        int | None, Query(ge=0, le=SMALL, description="Checkpoint to fork; default: the newest")
    ] = None,
) -> Any:
    """The document for ``POST /api/runs`` that creates a clone of the run, or a fork."""
    run = run_to_see(request, run_id)
    if not fork:
        return document_of(clone_and_fork.clone_of(run))
    rounds = clone_and_fork.forkable(run)
    if not rounds:
        raise ActionRefused("expected a run with a checkpoint to fork from, found none")
    return document_of(clone_and_fork.fork_of(run, rounds[0] if round is None else round))


@router.get("/runs/{uuid:run_id}/alerts", response=responses(list[shared.Alert], but=(409, 413)))
def list_alerts(request: HttpRequest, run_id: RunId) -> Any:
    """Open alerts first, then the newest."""
    return alerting.alert_rows(run_to_see(request, run_id))


@router.post(
    "/runs/{uuid:run_id}/alerts/{int:alert_id}/acknowledge",
    auth=OPERATORS,
    response=responses(shared.Done),
)
def acknowledge_alert(request: HttpRequest, run_id: RunId, alert_id: RowId) -> Any:
    """Mark the alert as seen by the caller, who takes care of it."""
    run, user = run_to_operate(request, run_id)
    alert = get_object_or_404(run.alerts.select_related("run", "replica"), pk=alert_id)
    return {"changed": alerting.acknowledge(alert, actor=user), "state": run.state}
