"""Content of the run page's drawer: a replica or an event, as HTML fragments."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from dashboard.access import replica_or_404
from dashboard.views.access import run_to_see
from executors.registry import BACKENDS
from runs import permissions
from runs.ingest.limits import SMALL_LIMIT
from runs.queries import activity, failures, fleet, replica_history, selectors
from runs.states import RUN_ENDED, ReplicaState, RunState

EVENTS = 12
ATTEMPTS = 5
LINES = 12


@require_safe
@never_cache
def replica(request: HttpRequest, run_id: Any, number: int) -> HttpResponse:
    run = run_to_see(request, run_id)
    found = replica_or_404(run, number)
    failure = failures.replica_failure(found)
    over = run.state in RUN_ENDED or run.state == RunState.STOPPING
    context = {
        "run": run,
        "replica": fleet.replica_row(found),
        "pool_name": fleet.pool_name(found.pool),
        "backend": BACKENDS.get(found.pool.backend, found.pool.backend),
        "tally": replica_history.tally(found),
        "attempts": fleet.attempt_rows(found)[:ATTEMPTS],
        "failure": failure,
        "rows": activity.activity(run, activity.Filters(replica=number), limit=EVENTS),
        "lines": () if failure else selectors.log_rows(run, replica=number, limit=LINES),
        "may_restart": not over and found.state != ReplicaState.DONE,
        "can_operate": permissions.can_operate(request.user, run),
        "can_submit": failure is not None and permissions.can_submit(request.user),
    }
    return render(request, "runs/_drawer_replica.html", context)


@require_safe
@never_cache
def event(request: HttpRequest, run_id: Any, number: int) -> HttpResponse:
    run = run_to_see(request, run_id)
    events = selectors.events_of(run, 0)
    found = get_object_or_404(events, pk=min(number, SMALL_LIMIT))
    return render(
        request, "runs/_drawer_event.html", {"run": run, "event": selectors.event_row(found)}
    )
