"""Actions of an operator on a whole run: pause, resume, save, stop, describe, archive, delete. Each
is a POST that redirects to the run page with a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from dashboard.parameters import text_of
from dashboard.views.access import act, run_to_operate, signed_in, to_tab
from runs.actions import deletion, lifecycle, replicas_and_pools, trackers
from runs.exceptions import ActionRefused
from runs.models import Run


def _act(
    request: HttpRequest, run_id: Any, action: Callable[[Run, User], bool], done: str
) -> HttpResponse:
    run, user = run_to_operate(request, run_id), signed_in(request)
    act(request, run, run.name, lambda: action(run, user), done)
    return redirect("run", run_id=run.pk)


@require_POST
def stop(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Stop the run at its newest committed round; ``force`` ends its jobs immediately."""
    run, user = run_to_operate(request, run_id), signed_in(request)
    if request.POST.get("force"):
        stopped = lifecycle.force_stop(run, actor=user)
    else:
        stopped = replicas_and_pools.request_stop(run, actor=user)
    if not stopped:
        messages.info(request, f"{run.name} is already {run.state}.")
    return redirect("run", run_id=run.pk)


@require_POST
def pause(request: HttpRequest, run_id: Any) -> HttpResponse:
    done = "pausing; it costs nothing once its replicas have saved and exited"
    return _act(request, run_id, lambda run, user: lifecycle.pause(run, actor=user), done)


@require_POST
def resume(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Resume a run that is paused, or that ended without final weights."""
    done = "resuming; its replicas are being launched"
    return _act(request, run_id, lambda run, user: lifecycle.resume(run, actor=user), done)


@require_POST
def mirror(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Mirror the run's metrics to a tracker, or ``stop`` that."""
    run, user = run_to_operate(request, run_id), signed_in(request)
    name, stop = text_of(request.POST, "tracker"), bool(request.POST.get("stop"))
    change = trackers.stop_mirror if stop else trackers.mirror_run
    done = f"no longer mirrored to {name}" if stop else f"mirrored to {name}"
    act(request, run, run.name, lambda: change(run, name, actor=user), done)
    return to_tab(run.pk, "settings")


@require_POST
def save(request: HttpRequest, run_id: Any) -> HttpResponse:
    done = "the next committed round will be saved as a checkpoint"
    return _act(request, run_id, lambda run, user: lifecycle.save(run, actor=user), done)


@require_POST
def archive(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Archive the run; an empty ``archived`` restores it."""
    archived = bool(request.POST.get("archived"))
    done = "archived; lists hide it" if archived else "restored to the list"
    return _act(
        request,
        run_id,
        lambda run, user: lifecycle.archive(run, actor=user, archived=archived),
        done,
    )


@require_POST
def describe(request: HttpRequest, run_id: Any) -> HttpResponse:
    notes = request.POST.get("notes", "").replace("\r\n", "\n")
    tags = request.POST.get("tags", "").replace(",", " ").split()
    return _act(
        request,
        run_id,
        lambda run, user: lifecycle.describe(run, notes=notes, tags=tags, actor=user),
        "notes and tags saved",
    )


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def delete(request: HttpRequest, run_id: Any) -> HttpResponse:
    """The confirmation page, which asks for the run's name, and the deletion."""
    run, user = run_to_operate(request, run_id), signed_in(request)
    typed, objects = request.POST.get("name", ""), bool(request.POST.get("objects"))
    context: dict[str, Any] = {"run": run, "typed": typed, "objects": objects, "error": ""}
    if request.method == "POST":
        try:
            lifecycle.delete(run, actor=user, name=typed, objects=objects)
        except ActionRefused as error:
            context |= {"error": str(error), "plan": deletion.plan_deletion(run)}
            return render(request, "runs/delete.html", context, status=422)
        messages.success(request, f"Deleting {run.name}.")
        return redirect("runs")
    context["plan"] = deletion.plan_deletion(run)
    return render(request, "runs/delete.html", context)
