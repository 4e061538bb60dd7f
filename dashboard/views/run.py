"""The run page and its JSON. Everything that changes comes from ``snapshot.json`` and the live
stream; the server renders the frame, the header and the settings."""

from __future__ import annotations

import json
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_safe

from dashboard.parameters import text_of
from dashboard.presentation.formats import exact
from dashboard.presentation.run_figures import live_figures
from dashboard.views.access import run_to_see
from dashboard.views.activity import activity_context
from dashboard.views.checkpoints import checkpoint_context
from dashboard.views.evaluations import evaluation_context
from dashboard.views.plain_lists import plain_context
from dashboard.views.view_menu import run_view_menu
from diloco.protocol.settings import SECTIONS, SettingSpec, setting_fields
from diloco.protocol.workload import GPT_SIZES
from runs import live_stream, permissions
from runs.actions import lifecycle
from runs.backends import health, storage_health
from runs.backends.health import is_stale
from runs.ingest.limits import INT_LIMIT
from runs.models import Run
from runs.queries import failures, findings, run_page, selectors, trackers
from runs.states import RUN_LIVE, RunState
from runs.submit import clone_and_fork

TABS = (
    "overview",
    "rounds",
    "timeline",
    "replicas",
    "logs",
    "system",
    "checkpoints",
    "evaluations",
    "settings",
    "activity",
)
RENAMED = {"events": "activity", "alerts": "activity"}
"""Tabs of older links."""
RAIL_COOKIE = "run-rail"
"""Whether the left rail is closed; the page sets it. A cookie, so that nothing moves while the page
loads."""
DENSE_RAIL = 24
"""More replicas are dots alone in the rail; ``static/js/run/rail.js`` has the same number."""
NEWEST = 12
"""Latest events on the overview, without JavaScript."""
MAX_LOG_LINES = 2000
START_STEPS = (
    "Queued",
    "Launched",
    "Image",
    "First heartbeat",
    "First step",
    "First exchange",
)
"""Steps of a start, which ``static/js/run/checklist.js`` follows."""


@require_safe
@never_cache
def detail(request: HttpRequest, run_id: Any) -> HttpResponse:
    """The page; with ``?part=failure`` only the failure card."""
    run = run_to_see(request, run_id)
    if request.GET.get("part") == "failure":
        return render(request, "runs/_failure.html", failure_context(request, run))
    tab = request.GET.get("tab", "")
    tab = RENAMED.get(tab, tab)
    fragments = run.settings.num_fragments
    size = GPT_SIZES.get(str(run.workload.get("size", "")))
    header, shown = selectors.run_header(run), banners(run)
    replicas = list(run.replicas.order_by("number").values("number", "state", "pool_id"))
    pools = list(run.pools.select_related("credential"))
    tab = tab if tab in TABS else TABS[0]
    latest = activity_context(request, run)
    context = {
        "run": run,
        "header": header,
        "figures_now": live_figures(
            header,
            created_at=run.created_at,
            ended_at=run.ended_at,
            now=timezone.now(),
            current=not (run.ended or shown["stale"] or shown["silent_since"] is not None),
            seen_at=None if run.ended else run.last_seen_at,
        ),
        "replicas": replicas,
        "heat": heat_frame([one["number"] for one in replicas]),
        "start_steps": START_STEPS,
        "dense": len(replicas) > DENSE_RAIL,
        "tab": tab,
        "tabs": TABS,
        "log_filters": request.GET if tab == "logs" else {},
        "may": allowed_actions(run),
        "origin": origin_of(run),
        "sections": settings_sections(run),
        "rail_closed": request.COOKIES.get(RAIL_COOKIE) == "closed",
        "findings": findings.of_run(run),
        **latest,
        "newest": latest["rows"][:NEWEST],
        "mirrors": trackers.mirror_rows(run),
        "tracker_choices": trackers.choices(run),
        "pools": pools,
        **plain_context(request, run, tab, pools=pools, replicas=replicas),
        "can_view": permissions.can_view(request.user),
        **run_view_menu(request, run),
        "size": size,
        **shown,
        "fragments": range(fragments) if fragments > 1 else None,
        "arguments": json.dumps(run.workload.get("arguments", {})),
        **checkpoint_context(request, run),
        **evaluation_context(run),
        **failure_context(request, run),
    }
    return render(request, "runs/detail.html", context)


OUTCOMES = {
    "included": "included",
    "uploaded": "uploaded, round open",
    "late": "late",
    "refused": "refused",
    "void": "round void",
    "healing": "healing",
    "missing": "missing",
}
"""Legend of the map of replicas and rounds."""


def heat_frame(numbers: list[int]) -> dict[str, Any]:
    """Legend and heights (px) of the map of rounds and of the timeline;
    ``static/js/run/heatmap.js`` and ``timeline.js`` draw rows of the same heights."""
    rows = max(len(numbers), 1)
    return {
        "legend": OUTCOMES.items(),
        "small_px": 18 + rows * min(max(282 // rows, 1), 19) + 1,
        "large_px": 44 + rows * min(max(516 // rows, 1), 32) + 1,
        "timeline_px": 22 + rows * min(max(560 // rows, 2), 26) + 4,
        "names_px": 8 + 8 * len(str(max(numbers, default=0))),
    }


def failure_context(request: HttpRequest, run: Run) -> dict[str, Any]:
    """Context of ``partials/failure.html`` on the page of a run."""
    failure = failures.run_failure(run)
    return {
        "run": run,
        "failure": failure,
        "may_resume": bool(failure) and not lifecycle.why_not_resumed(run),
        "can_operate": permissions.can_operate(request.user, run),
        "can_submit": permissions.can_submit(request.user),
    }


def settings_sections(run: Run) -> list[dict[str, Any]]:
    """The group settings of ``group.json`` in the order of the form, as text."""
    return [
        {
            "title": title,
            "rows": [
                settings_row(spec, getattr(run.settings, spec.name))
                for spec in setting_fields()
                if spec.section == section
            ],
        }
        for section, title in SECTIONS.items()
    ]


def settings_row(spec: SettingSpec, value: Any) -> dict[str, Any]:
    """One setting as text. A value of 0 is shown as its meaning, without a unit."""
    zero_text = spec.zero if value == 0 else ""
    unit = spec.unit.removesuffix("s") if value == 1 and len(spec.unit) > 1 else spec.unit
    return {
        "spec": spec,
        "shown": zero_text or exact(value),
        "unit": "" if zero_text else unit,
        "default": (spec.zero if spec.default == 0 else "") or exact(spec.default),
        "is_default": value == spec.default,
    }


def banners(run: Run) -> dict[str, Any]:
    """Context of ``partials/banners.html``."""
    return {
        "storage": storage_health.storage_problem(),
        "silent_since": silent_since(run),
        "stale": is_stale(run, now=timezone.now()),
        "stale_after_s": health.STALE_RUN_S,
        "late_after_s": health.LATE_RUN_S,
        **run_page.bucket_trouble(run),
    }


def silent_since(run: Run) -> str | None:
    """Time of the last sign of a worker, or None; always None for a run that has ended."""
    return None if run.ended else health.silent_since()


def allowed_actions(run: Run) -> dict[str, bool]:
    """The actions that the state of the run allows. Two queries; one for an active run."""
    live = run.state in RUN_LIVE
    resume_ended = run.ended and not lifecycle.why_not_resumed(run)
    return {
        "pause": live or run.state == RunState.PROVISIONING,
        "save": live,
        "resume": run.state == RunState.PAUSED or resume_ended,
        "resume_ended": not run.ended or resume_ended,
        "fork": bool(clone_and_fork.forkable(run)),
    }


def origin_of(run: Run) -> Run | dict[str, Any]:
    """The run that this run was forked from; {} if none, without a name if it was deleted."""
    if run.forked_from is None:
        return {}
    return run_page.by_id(run.forked_from) or {"gone": True}


@require_safe
@never_cache
@gzip_page
def snapshot(request: HttpRequest, run_id: Any) -> JsonResponse:
    """The snapshot, and the position from which the stream continues it; ``?curves=0`` leaves out
    the points, for charts that load their windows.

    The position is read before the first row. A stream that continues there can repeat rows but
    never misses any: points are identified by step, events by ID, rounds and replicas by number.
    """
    cursor = live_stream.latest_id()
    run = run_to_see(request, run_id)
    body = selectors.snapshot(run, curves=request.GET.get("curves") != "0")
    return JsonResponse(
        body | {"cursor": cursor, "silent_since": silent_since(run)},
        json_dumps_params={"separators": (",", ":")},
    )


@require_safe
@never_cache
def logs(request: HttpRequest, run_id: Any) -> HttpResponse:
    """The newest log lines, oldest first: ``?replica=0&after=<id>&q=words&level=warning``; or the
    lines around ``?line=<id>``."""
    run = run_to_see(request, run_id)
    try:
        replica = int(request.GET["replica"]) if request.GET.get("replica") else None
        after = int(request.GET.get("after", "0"))
        around = int(request.GET["line"]) if request.GET.get("line") else None
    except ValueError as error:
        return HttpResponseBadRequest(f"expected whole numbers, found {error}")
    if max(abs(n) for n in (replica or 0, after, around or 0)) > INT_LIMIT:
        return HttpResponseBadRequest("expected smaller numbers")
    rows = selectors.log_rows(
        run,
        replica=replica,
        after_id=after,
        limit=MAX_LOG_LINES,
        search=text_of(request.GET, "q")[:200],
        level=request.GET.get("level", ""),
        around=around,
    )
    return JsonResponse({"lines": rows})
