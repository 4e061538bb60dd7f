"""Experiment trackers, for administrators: add, change, delete."""

from __future__ import annotations

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from dashboard.forms.settings import TrackerForm
from dashboard.views.settings_access import add_problem, administrator
from diloco.trackers.opening import KINDS
from runs.actions import trackers as actions
from runs.exceptions import InvalidRun
from runs.models import ExperimentTracker
from runs.queries import trackers as queries


@never_cache
@require_http_methods(["GET", "HEAD"])
def trackers(request: HttpRequest) -> HttpResponse:
    administrator(request)
    context = {"trackers": queries.tracker_rows(), "kinds": KINDS.values()}
    return render(request, "settings/trackers.html", context)


@never_cache
@sensitive_post_parameters()
@require_http_methods(["GET", "HEAD", "POST"])
def add(request: HttpRequest, kind: str) -> HttpResponse:
    """The form for a tracker of one kind."""
    administrator(request)
    if kind not in KINDS:
        raise Http404
    form = TrackerForm(KINDS[kind], request.POST if request.method == "POST" else None)
    return _save(request, form, None)


@never_cache
@sensitive_post_parameters()
@require_http_methods(["GET", "HEAD", "POST"])
def tracker(request: HttpRequest, tracker_id: int) -> HttpResponse:
    """Change a tracker."""
    administrator(request)
    found = _found(tracker_id)
    initial = {name: getattr(found, name) for name in ("name", "server", "project", "enabled")}
    data = request.POST if request.method == "POST" else None
    return _save(request, TrackerForm(KINDS[found.kind], data, initial=initial), found)


@require_POST
def delete(request: HttpRequest, tracker_id: int) -> HttpResponse:
    actor, found = administrator(request), _found(tracker_id)
    actions.delete_tracker(found, actor=actor)
    messages.success(request, f"Tracker {found} deleted. The runs in it stay there.")
    return redirect("settings-trackers")


def _found(tracker_id: int) -> ExperimentTracker:
    found = queries.tracker(tracker_id)
    if found is None or found.kind not in KINDS:
        raise Http404
    return found


def _save(
    request: HttpRequest, form: TrackerForm, changed: ExperimentTracker | None
) -> HttpResponse:
    """Store a valid form; otherwise show it, with what is wrong."""
    if request.method == "POST" and form.is_valid():
        try:
            saved = actions.save_tracker(
                form.cleaned_data["name"],
                form.destination(),
                secrets=form.secrets(),
                actor=administrator(request),
                tracker=changed,
                enabled=form.cleaned_data["enabled"],
            )
        except InvalidRun as error:
            add_problem(form, error)
        else:
            messages.success(request, f"Tracker {saved} saved.")
            return redirect("settings-trackers")
    context = {"form": form, "changed": changed, "kind": form.kind}
    return render(request, "settings/tracker.html", context, status=422 if form.errors else 200)
