"""Experiment trackers, and the mirrors of a run."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router
from pydantic import Field

from archipelago import rows as shared
from archipelago.tracker_rows import Mirror, Tracker
from dashboard.api.auth import OPERATORS, reader, run_to_operate, run_to_see
from dashboard.api.types import NO_NUL, Body, RunId, done, responses
from runs.actions import trackers
from runs.queries import trackers as tracker_queries

router = Router(tags=["trackers"])


class MirrorDocument(Body):
    """``tracker`` is the name of a tracker."""

    tracker: Annotated[str, Field(min_length=1, max_length=trackers.NAME_LENGTH, pattern=NO_NUL)]


@router.get("/trackers", response=responses(list[Tracker], but=(404, 409, 413)))
def list_trackers(request: HttpRequest) -> Any:
    """List the trackers that an administrator has added."""
    reader(request)
    return tracker_queries.tracker_rows()


@router.get("/runs/{uuid:run_id}/mirrors", response=responses(list[Mirror], but=(409, 413)))
def list_mirrors(request: HttpRequest, run_id: RunId) -> Any:
    """List the trackers that receive the run's metrics, with their progress."""
    return tracker_queries.mirror_rows(run_to_see(request, run_id))


@router.post("/runs/{uuid:run_id}/mirrors", auth=OPERATORS, response=responses(shared.Done))
def add_mirror(request: HttpRequest, run_id: RunId, body: MirrorDocument) -> Any:
    """Mirror the run's metrics to a tracker, from its first point on."""
    run, user = run_to_operate(request, run_id)
    return done(run, trackers.mirror_run(run, body.tracker, actor=user))


@router.post("/runs/{uuid:run_id}/mirrors/stop", auth=OPERATORS, response=responses(shared.Done))
def stop_mirror(request: HttpRequest, run_id: RunId, body: MirrorDocument) -> Any:
    """Deliver no further points to a tracker."""
    run, user = run_to_operate(request, run_id)
    return done(run, trackers.stop_mirror(run, body.tracker, actor=user))
