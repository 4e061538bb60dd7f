"""One replica: how it is, its attempts and what the backend logged of each, and what an operator
may do with it."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from dashboard.views.access import run_to_operate, run_to_see
from dashboard.views.run import banners
from executors.registry import BACKENDS
from runs import permissions
from runs.actions import replicas_and_pools
from runs.backends.attempt_log import read_log
from runs.exceptions import IllegalTransition
from runs.models import Replica, ReplicaAttempt, Run
from runs.queries import fleet, replica_history
from runs.states import RUN_ENDED, ReplicaState, RunState


@require_safe
@never_cache
def detail(request: HttpRequest, run_id: Any, number: int) -> HttpResponse:
    """The page; ``?part=1`` is what of it moves."""
    run = run_to_see(request, run_id)
    replica = _replica(run, number)
    row = fleet.replica_row(replica)
    attempts = fleet.attempt_rows(replica)
    over = run.state in RUN_ENDED or run.state == RunState.STOPPING
    history = replica_history.round_history(replica)
    context = {
        "run": run,
        **banners(run),
        "replica": row,
        "pool": replica.pool,
        "pool_name": fleet.pool_name(replica.pool),
        "backend": BACKENDS.get(replica.pool.backend, replica.pool.backend),
        "attempts": attempts,
        "shown": _shown(request, attempts),
        "history": history,
        "tally": replica_history.tally(replica),
        "strip": replica_history.phase_strip(history),
        "up_per_s": replica_history.bandwidth(history, "up"),
        "down_per_s": replica_history.bandwidth(history, "down"),
        "trace": replica_history.last_traceback(replica),
        "quarantined": replica_history.quarantined(replica),
        "may_stop": not over and not replica.ended,
        "may_restart": not over and replica.state != ReplicaState.DONE,
        "may_operate": permissions.may_operate(request.user, run),
    }
    part = "runs/_replica.html" if request.GET.get("part") else "runs/replica.html"
    return render(request, part, context)


@require_safe
@never_cache
def log(request: HttpRequest, run_id: Any, number: int) -> HttpResponse:
    """What the backend has of an attempt's output: ``?attempt=2&after=<position>``."""
    run = run_to_see(request, run_id)
    try:
        wanted = int(request.GET.get("attempt", ""))
    except ValueError:
        return HttpResponseBadRequest("expected the number of an attempt")
    attempt = get_object_or_404(
        ReplicaAttempt.objects.select_related("replica__pool__credential"),
        replica__run=run,
        replica__number=number,
        number=wanted,
    )
    tail = read_log(attempt, after=request.GET.get("after", "")[:500])
    return JsonResponse(
        {
            "lines": tail.lines,
            "position": tail.position,
            "cut": tail.cut,
            "unknown": tail.unknown,
            "ended": attempt.ended_at is not None,
        }
    )


@require_POST
def stop(request: HttpRequest, run_id: Any, number: int) -> HttpResponse:
    """``force`` ends its job now; else it may give its work to a round first."""
    replica = _replica(run_to_operate(request, run_id), number)
    return _act(request, replica, replicas_and_pools.stop_replica, "told to leave")


@require_POST
def restart(request: HttpRequest, run_id: Any, number: int) -> HttpResponse:
    replica = _replica(run_to_operate(request, run_id), number)
    return _act(request, replica, replicas_and_pools.restart_replica, "will be launched again")


def _act(request: HttpRequest, replica: Replica, service: Any, done: str) -> HttpResponse:
    assert isinstance(request.user, User)
    name = f"Replica {replica.number}"
    try:
        moved = service(replica, actor=request.user, force=bool(request.POST.get("force")))
    except IllegalTransition as error:
        messages.warning(request, f"{name}: {error}")
    else:
        if moved:
            messages.success(request, f"{name}: {done}.")
        else:
            messages.info(request, f"{name} is {replica.state} already; nothing was left to do.")
    if request.POST.get("from") == "run":
        return redirect(reverse("run", args=[replica.run_id]) + "?tab=replicas")
    return redirect("replica", run_id=replica.run_id, number=replica.number)


def _replica(run: Run, number: int) -> Replica:
    found = Replica.objects.select_related("pool__credential")
    replica = get_object_or_404(found, run=run, number=number)
    replica.run = run
    return replica


def _shown(request: HttpRequest, attempts: list[dict[str, Any]]) -> int | None:
    """The attempt whose log is shown: the one in the address, else the newest."""
    numbers = [attempt["number"] for attempt in attempts]
    known = {str(number): number for number in numbers}
    return known.get(request.GET.get("attempt", ""), numbers[0] if numbers else None)
