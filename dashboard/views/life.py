"""What an operator does with a run as a whole: pause, resume, save, stop, describe, archive,
delete. Each action is a POST and leads back to the run with what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from dashboard.views.access import run_to_operate
from runs.actions import deletion, lifecycle, replicas_and_pools
from runs.exceptions import CannotDo
from runs.models import Run


def _act(
    request: HttpRequest, run_id: Any, action: Callable[[Run, User], bool], done: str
) -> HttpResponse:
    run = run_to_operate(request, run_id)
    assert isinstance(request.user, User)
    try:
        changed = action(run, request.user)
    except CannotDo as error:
        messages.error(request, f"{run.name}: {error}.")
    else:
        if changed:
            messages.success(request, f"{run.name}: {done}.")
        else:
            messages.info(request, f"{run.name} is {run.state}; nothing was left to do.")
    return redirect("run", run_id=run.pk)


@require_POST
def stop(request: HttpRequest, run_id: Any) -> HttpResponse:
    """``force`` ends its jobs now; else it ends at its newest committed round."""
    run = run_to_operate(request, run_id)
    assert isinstance(request.user, User)
    if request.POST.get("force"):
        stopped = lifecycle.force_stop(run, actor=request.user)
    else:
        stopped = replicas_and_pools.request_stop(run, actor=request.user)
    if not stopped:
        messages.info(request, f"{run.name} was already {run.state}; nothing was left to stop.")
    return redirect("run", run_id=run.pk)


@require_POST
def pause(request: HttpRequest, run_id: Any) -> HttpResponse:
    words = "its replicas save and leave, then it costs nothing until you resume it"
    return _act(request, run_id, lambda run, user: lifecycle.pause(run, actor=user), words)


@require_POST
def resume(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Of a run that is paused, or over without final weights."""
    words = "its replicas are launched again"
    return _act(request, run_id, lambda run, user: lifecycle.resume(run, actor=user), words)


@require_POST
def save(request: HttpRequest, run_id: Any) -> HttpResponse:
    words = "the next round that is committed is saved as a checkpoint"
    return _act(request, run_id, lambda run, user: lifecycle.save(run, actor=user), words)


@require_POST
def archive(request: HttpRequest, run_id: Any) -> HttpResponse:
    """``archived`` empty takes it into lists again."""
    archived = bool(request.POST.get("archived"))
    words = "it is left out of lists" if archived else "it is in lists again"
    return _act(
        request,
        run_id,
        lambda run, user: lifecycle.archive(run, actor=user, archived=archived),
        words,
    )


@require_POST
def describe(request: HttpRequest, run_id: Any) -> HttpResponse:
    notes = request.POST.get("notes", "").replace("\r\n", "\n")
    tags = request.POST.get("tags", "").replace(",", " ").split()
    return _act(
        request,
        run_id,
        lambda run, user: lifecycle.describe(run, notes=notes, tags=tags, actor=user),
        "notes and tags are kept",
    )


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def delete(request: HttpRequest, run_id: Any) -> HttpResponse:
    """A page of its own, on which the run's name is typed."""
    run = run_to_operate(request, run_id)
    assert isinstance(request.user, User)
    typed, objects = request.POST.get("name", ""), bool(request.POST.get("objects"))
    context: dict[str, Any] = {"run": run, "typed": typed, "objects": objects, "error": ""}
    if request.method == "POST":
        try:
            lifecycle.delete(run, actor=request.user, name=typed, objects=objects)
        except CannotDo as error:
            context |= {"error": str(error), "plan": deletion.plan_deletion(run)}
            return render(request, "runs/delete.html", context, status=422)
        messages.success(request, f"{run.name} is being deleted.")
        return redirect("runs")
    context["plan"] = deletion.plan_deletion(run)
    return render(request, "runs/delete.html", context)
