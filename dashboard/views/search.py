"""Search: ``/search?q=…`` as a page, ``/search.json`` for the dialog that Ctrl-K opens, and the
page on which an action on a run is confirmed."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from dashboard.presentation import palette
from dashboard.views.access import reader, run_to_operate
from runs.queries import finder

EFFECTS = {
    "stop": "The run ends at its newest committed round, and its final weights are written. It "
    "can't be resumed afterwards.",
    "pause": "Every replica contributes its work, saves its state and leaves. A paused run costs "
    "nothing, and can be resumed.",
    "resume": "The same replicas are launched again, from the newest checkpoint.",
    "save": "The next committed round is written as a checkpoint. Training goes on.",
}


@require_safe
@never_cache
def search(request: HttpRequest) -> HttpResponse:
    user = reader(request)
    text = finder.clean(request.GET.get("q", ""))
    run = request.GET.get("run", "")[:36]
    found = palette.entries(user, text, run_id=run, limit=50)
    return render(request, "search/search.html", {"query": text, "run_id": run, "found": found})


@require_safe
@never_cache
def search_json(request: HttpRequest) -> JsonResponse:
    user = reader(request)
    text, run = request.GET.get("q", ""), request.GET.get("run", "")[:36]
    return JsonResponse({"found": palette.entries(user, text, run_id=run)})


@require_safe
@never_cache
def do(request: HttpRequest, run_id: Any, verb: str) -> HttpResponse:
    """Confirm an action on a run."""
    run = run_to_operate(request, run_id)
    if verb not in EFFECTS:
        raise Http404
    context = {
        "run": run,
        "verb": palette.VERBS[verb][0],
        "effect": EFFECTS[verb],
        "is_possible": palette.is_possible(verb, run.state),
        "action": reverse(f"run-{verb}", args=[run.pk]),
        "is_stop": verb == "stop",
    }
    return render(request, "search/confirm.html", context)
