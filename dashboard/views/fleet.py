"""The fleet: every live job of every run, ``/fleet?backend=modal&owner=olga&state=computing``.

The address holds the filters and the page. The part that changes is fetched again when the live
stream reports a change; without JavaScript the page is complete and a reload brings it up to date.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from dashboard.live.cursor import follows_stream
from dashboard.parameters import text_of
from dashboard.presentation.badges import BREAKERS
from dashboard.views.access import reader
from executors.registry import BACKENDS
from runs.backends import health, storage_health
from runs.queries import fleet_trouble, live_jobs
from runs.queries.live_jobs import JobFilter

FILTER_LENGTH = 150
"""Longest value of a filter: that of a user name."""
CHOICES = 200
"""Values that a filter offers."""
TROUBLES = 20
"""Pools with trouble, and orphaned jobs, that the page shows."""


@require_safe
@never_cache
@follows_stream
def fleet(request: HttpRequest) -> HttpResponse:
    """The page; with ``?part=1`` only the fragment that changes."""
    user = reader(request)
    chosen = job_filter(request)
    before = request.GET.get("before", "")
    jobs = live_jobs.live_jobs(user)
    counted = live_jobs.counts(jobs)
    rows, after = live_jobs.page(jobs, chosen, before=before)
    pools, more_pools = fleet_trouble.troubled_pools(
        user, chosen, now=timezone.now(), limit=TROUBLES
    )
    orphans, more_orphans = fleet_trouble.orphan_rows(user, chosen, limit=TROUBLES)
    context = {
        "jobs": [{**row, "since": _since(row)} for row in rows],
        "total": live_jobs.matching_total(counted, chosen),
        "backends": [
            {**row, "address": address(chosen.but(backend=row["backend"]))}
            for row in live_jobs.by_backend(counted, chosen)
        ],
        "filters": [_filter(counted, chosen, name) for name in ("backend", "owner", "state")],
        "pools": [{**row, "look": BREAKERS[row["state"]]} for row in pools],
        "more_pools": more_pools,
        "orphans": orphans,
        "more_orphans": more_orphans,
        "labels": BACKENDS,
        "chosen": chosen,
        "filtered": chosen != JobFilter(),
        "here": address(chosen),
        "first_page": not live_jobs.is_place(before),
        "after": address(chosen, before=after) if after else "",
        "storage": storage_health.storage_problem(),
        "silent_since": health.silent_since(),
        "now": timezone.now(),
    }
    part = "fleet/_fleet.html" if request.GET.get("part") else "fleet/fleet.html"
    return render(request, part, context)


def job_filter(request: HttpRequest) -> JobFilter:
    """The filters of an address. A value that a column cannot hold matches no job."""
    names = ("backend", "owner", "state")
    backend, owner, state = (text_of(request.GET, name)[:FILTER_LENGTH] for name in names)
    return JobFilter(backend=backend, owner=owner, state=state)


def address(chosen: JobFilter, **more: str) -> str:
    """The query string of filters; at least ``?``, so that it works as a link."""
    values = {"backend": chosen.backend, "owner": chosen.owner, "state": chosen.state, **more}
    return f"?{urlencode({name: value for name, value in values.items() if value})}"


def _filter(counted: list[live_jobs.JobCount], chosen: JobFilter, name: str) -> dict[str, Any]:
    """A filter with its values, the most frequent first."""
    value = getattr(chosen, name)
    found = [text for text, _ in live_jobs.choices(counted, chosen, name)]
    shown = found[:CHOICES]
    if value and value not in shown:
        shown.append(value)
    labels = BACKENDS if name == "backend" else {}
    return {
        "name": name,
        "value": value,
        "choices": [(text, labels.get(text, text)) for text in shown],
    }


def _since(row: dict[str, Any]) -> str:
    """When the job started, or since when it waits."""
    return str(row["started_at"] or row["launched_at"] or row["created_at"])
