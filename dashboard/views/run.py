"""The run page and the JSON it lives from. Everything that moves comes from ``snapshot.json``
and the stream; the server renders the frame, the header and the settings."""

from __future__ import annotations

import json
from typing import Any

from django.db.models import F
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from dashboard.presentation.formats import exact
from dashboard.views.access import run_to_see
from dashboard.views.checkpoints import checkpoint_context
from diloco.protocol.settings import SECTIONS, SettingSpec, setting_fields
from diloco.protocol.workload import GPT_SIZES
from runs.actions import lifecycle
from runs.alerts import store as alerting
from runs.backends import health, storage_health
from runs.backends.health import is_stale
from runs.ingest.limits import INT_LIMIT, SMALL_LIMIT
from runs.json_values import iso
from runs.models import IngestState, Run
from runs.queries import selectors
from runs.reconcile.bucket_writes import WRITE_FAILED
from runs.states import RUN_LIVE, RunState
from runs.submit import clone_and_fork

TABS = (
    "overview", "rounds", "timeline", "replicas", "logs", "system", "checkpoints",
    "settings", "events", "alerts",
)  # fmt: skip
MAX_POINTS = 4000
MAX_LOG_LINES = 2000


@require_safe
@never_cache
def detail(request: HttpRequest, run_id: Any) -> HttpResponse:
    run = run_to_see(request, run_id)
    tab = request.GET.get("tab", "")
    fragments = int(run.group_settings["num_fragments"])
    size = GPT_SIZES.get(str(run.workload.get("size", "")))
    context = {
        "run": run,
        "header": selectors.run_header(run),
        "tab": tab if tab in TABS else TABS[0],
        "tabs": TABS,
        "may": what_goes(run),
        "origin": origin_of(run),
        "sections": settings_sections(run),
        "alerts": alerting.alert_rows(run),
        "pools": run.pools.all(),
        "size": size,
        **banners(run),
        "fragments": range(fragments) if fragments > 1 else None,
        "arguments": json.dumps(run.workload.get("arguments", {})),
        **checkpoint_context(request, run),
    }
    return render(request, "runs/detail.html", context)


def settings_sections(run: Run) -> list[dict[str, Any]]:
    """The group's settings as ``group.json`` has them, in the form's order. Values, not inputs."""
    return [
        {
            "title": title,
            "rows": [
                settings_row(spec, run.group_settings.get(spec.name))
                for spec in setting_fields()
                if spec.section == section
            ],
        }
        for section, title in SECTIONS.items()
    ]


def settings_row(spec: SettingSpec, value: Any) -> dict[str, Any]:
    """A setting in the words of a person: 0 is what it means, without a unit."""
    word = spec.zero if value == 0 else ""
    return {
        "spec": spec,
        "shown": word or exact(value),
        "unit": "" if word else spec.unit,
        "default": (spec.zero if spec.default == 0 else "") or exact(spec.default),
        "is_default": value == spec.default,
    }


def banners(run: Run) -> dict[str, Any]:
    """What ``partials/banners.html`` is rendered from."""
    return {
        "storage": storage_health.storage_problem(),
        "silent_since": silent_since(run),
        "stale": is_stale(run, now=timezone.now()),
        "stale_after_s": health.STALE_RUN_S,
        **bucket_trouble(run),
    }


def bucket_trouble(run: Run) -> dict[str, Any]:
    """Why the bucket of a run that is not over cannot be read (``unreadable``, with since when) or
    written (``unwritable``); None where it can."""
    state = None if run.ended else IngestState.objects.filter(run=run).annotate(
        failed_writes=F("run__journal__failures")
    ).first()  # fmt: skip
    if state is not None and state.trouble:
        since = iso(state.trouble_since)
        trouble = {"trouble": str(state.trouble), "trouble_since": since, "message": state.message}
        return {"unreadable": trouble, "unwritable": None}
    failed = state is not None and state.failed_writes
    return {"unreadable": None, "unwritable": _failed_write(run) if failed else None}


def _failed_write(run: Run) -> str:
    """The newest event about a write that failed; a general sentence where it is gone."""
    events = run.events.filter(kind="store", message__contains=WRITE_FAILED).order_by("-pk")
    found = events.values_list("message", flat=True).first()
    return str(found or "the journal could not be written")


def silent_since(run: Run) -> str | None:
    """When the last worker was heard of; None as well for a run that needs none any more."""
    return None if run.ended else health.silent_since()


def what_goes(run: Run) -> dict[str, bool]:
    """What can be done with the run as it is. Two queries; one for a run that is not over."""
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
    """The run whose checkpoint this one began with; {} for none, no name if it is gone."""
    if run.forked_from is None:
        return {}
    return Run.objects.only("name").filter(pk=run.forked_from).first() or {"gone": True}


@require_safe
@never_cache
def snapshot(request: HttpRequest, run_id: Any) -> JsonResponse:
    """``?curves=0`` leaves out the points, for a page whose charts ask for their own windows."""
    run = run_to_see(request, run_id)
    found = selectors.snapshot(run, curves=request.GET.get("curves") != "0")
    return JsonResponse(found | {"silent_since": silent_since(run)})


@require_safe
@never_cache
def points(request: HttpRequest, run_id: Any) -> HttpResponse:
    """One series, re-sampled: ``?series=loss&replica=0&after_step=-1&max_points=2000``."""
    run = run_to_see(request, run_id)
    series = request.GET.get("series", "")
    try:
        replica = int(request.GET["replica"]) if request.GET.get("replica") else None
        after_step = int(request.GET.get("after_step", "-1"))
        max_points = int(request.GET.get("max_points", "2000"))
    except ValueError as error:
        return HttpResponseBadRequest(f"expected whole numbers, found {error}")
    if not series or not series.isprintable() or not 1 <= max_points <= MAX_POINTS:
        return HttpResponseBadRequest(
            f"expected a series and max_points of 1 to {MAX_POINTS}, "
            f"found {series!r} and {max_points}"
        )
    if abs(after_step) > INT_LIMIT or not 0 <= (replica or 0) <= SMALL_LIMIT:
        return HttpResponseBadRequest(
            f"expected numbers of a step and a replica, found {after_step} and {replica}"
        )
    return JsonResponse(
        selectors.points(run, series, replica=replica, after_step=after_step, max_points=max_points)
    )


@require_safe
@never_cache
def logs(request: HttpRequest, run_id: Any) -> HttpResponse:
    """The newest log lines, oldest first: ``?replica=0&after=<id>&q=words&level=warning``; or those
    around ``?line=<id>``."""
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
        search=request.GET.get("q", "")[:200].replace("\0", ""),
        level=request.GET.get("level", ""),
        around=around,
    )
    return JsonResponse({"lines": rows})
