"""The replica page: state, attempts with their backend logs, and the actions of an operator."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from dashboard.access import attempt_or_404, replica_or_404
from dashboard.live.cursor import follows_stream
from dashboard.views.access import act, run_to_operate, run_to_see, signed_in, to_tab
from dashboard.views.run import banners
from executors.registry import BACKENDS
from runs import permissions
from runs.actions import replicas_and_pools
from runs.backends import health
from runs.models import Replica
from runs.queries import failures, fleet, replica_history
from runs.queries.replicas import attempt_log
from runs.states import RUN_ENDED, ReplicaState, RunState


@require_safe
@never_cache
@follows_stream
def detail(request: HttpRequest, run_id: Any, number: int) -> HttpResponse:
    """The page; with ``?part=1`` only the fragment that changes."""
    run = run_to_see(request, run_id)
    replica = replica_or_404(run, number)
    row = fleet.replica_row(replica)
    paced = has_pace(replica)
    if not paced:
        row |= dict.fromkeys(("tokens_per_s", "gpu_busy", "gpu_memory_bytes"))
    attempts = fleet.attempt_rows(replica)
    over = run.state in RUN_ENDED or run.state == RunState.STOPPING
    history = replica_history.round_history(replica)
    failure = failures.replica_failure(replica)
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
        "up_per_s": replica_history.bandwidth(history, "up") if paced else None,
        "down_per_s": replica_history.bandwidth(history, "down") if paced else None,
        "failure": failure,
        "trace": None if failure and failure.traceback else replica_history.last_traceback(replica),
        "quarantined": replica_history.quarantined(replica),
        "may_stop": not over and not replica.ended,
        "may_restart": not over and replica.state != ReplicaState.DONE,
        "can_operate": permissions.can_operate(request.user, run),
        "can_submit": failure is not None and permissions.can_submit(request.user),
    }
    part = "runs/_replica.html" if request.GET.get("part") else "runs/replica.html"
    return render(request, part, context)


def has_pace(replica: Replica) -> bool:
    """Whether figures that hold only now, such as tokens per second, are recent."""
    now = timezone.now()
    seen = replica.beat_at
    is_old = seen is not None and (now - seen).total_seconds() > health.STALE_RUN_S
    return not (replica.ended or is_old or health.is_stale(replica.run, now=now))


@require_safe
@never_cache
def log(request: HttpRequest, run_id: Any, number: int) -> HttpResponse:
    """The backend's log of one attempt: ``?attempt=2&after=<position>``; with ``text=1`` as plain
    text, for browsers without JavaScript."""
    run = run_to_see(request, run_id)
    try:
        wanted = int(request.GET.get("attempt", ""))
    except ValueError:
        return HttpResponseBadRequest("expected the number of an attempt")
    attempt = attempt_or_404(run, number, wanted)
    found = attempt_log(attempt, after=request.GET.get("after", "")[:500])
    if request.GET.get("text"):
        text = found["unknown"] or "\n".join(found["lines"]) or "No output yet."
        body = f"{text}\n".encode(errors="replace")  # a backend can send lone surrogates
        return HttpResponse(body, content_type="text/plain; charset=utf-8")
    return JsonResponse(found)


@require_POST
def stop(request: HttpRequest, run_id: Any, number: int) -> HttpResponse:
    """Drain the replica; ``force`` ends its job immediately."""
    replica = replica_or_404(run_to_operate(request, run_id), number)
    return _act(request, replica, replicas_and_pools.stop_replica, "stopping")


@require_POST
def restart(request: HttpRequest, run_id: Any, number: int) -> HttpResponse:
    replica = replica_or_404(run_to_operate(request, run_id), number)
    return _act(request, replica, replicas_and_pools.restart_replica, "restarting")


def _act(request: HttpRequest, replica: Replica, service: Any, done: str) -> HttpResponse:
    user, force = signed_in(request), bool(request.POST.get("force"))
    name = f"Replica {replica.number}"
    act(request, replica, name, lambda: service(replica, actor=user, force=force), done)
    if request.POST.get("from") == "run":
        return to_tab(replica.run_id, "replicas")
    return redirect("replica", run_id=replica.run_id, number=replica.number)


def _shown(request: HttpRequest, attempts: list[dict[str, Any]]) -> int | None:
    """The attempt whose log is shown: from the URL, otherwise the newest."""
    numbers = [attempt["number"] for attempt in attempts]
    known = {str(number): number for number in numbers}
    return known.get(request.GET.get("attempt", ""), numbers[0] if numbers else None)
