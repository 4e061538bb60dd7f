"""Alerts of all runs: the page ``/alerts``, and the panel behind the bell of every page.

The address holds the filters and the position. Parts are fetched again when the live stream reports
a change of alerts; without JavaScript the bell is a link to the page.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.utils.dateparse import parse_datetime
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from dashboard.parameters import text_of
from dashboard.presentation.alert_places import place
from dashboard.views.access import reader
from runs import permissions
from runs.actions import alert_inbox as actions
from runs.alerts.rules import KINDS
from runs.queries import alert_inbox as queries
from runs.queries import selectors
from runs.queries.alert_inbox import AlertFilter

PANEL = 8
"""Alerts in the panel."""
UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


@require_safe
@never_cache
def alerts(request: HttpRequest) -> HttpResponse:
    """The page; with ``?part=1`` only its list, with ``?part=panel`` the panel."""
    user = reader(request)
    part = request.GET.get("part", "")
    if part == "panel":
        return _panel(request)
    chosen = _filter(request)
    before = request.GET.get("before", "")
    rows, after = queries.page(user, chosen, before=before)
    run = selectors.runs_for(user).filter(pk=chosen.run).first() if chosen.run else None
    counted = queries.counts(user, chosen)
    context = {
        "alerts": [_shown(request, row) for row in rows],
        "newest": rows[0]["opened_at"] if rows else "",
        "unread": queries.unread(user),
        "most_unread": queries.MOST_UNREAD,
        "firing": counted["firing"],
        "kinds": [
            {**kind, "address": _address(chosen.but(kind=kind["kind"]))}
            for kind in counted["kinds"]
        ],
        "tabs": [
            ("Firing", _address(chosen.but(firing=True)), chosen.firing, counted["firing"]),
            ("Recent", _address(chosen.but(firing=False), show="recent"), not chosen.firing, None),
        ],
        "chosen": chosen,
        "chosen_kind": KINDS.get(chosen.kind, chosen.kind),
        "chosen_run": run,
        "unfiltered": _address(AlertFilter(firing=chosen.firing)),
        "mine": _address(chosen.but(owner="" if chosen.owner else user.get_username())),
        "after": _address(chosen, before=after) if after else "",
        "first_page": not before,
        "here": _address(chosen),
    }
    template = "alerts/_list.html" if part else "alerts/alerts.html"
    return render(request, template, context)


def _panel(request: HttpRequest) -> HttpResponse:
    user = reader(request)
    firing, _ = queries.page(user, AlertFilter(firing=True), limit=PANEL)
    recent, _ = queries.page(user, AlertFilter(), limit=PANEL)
    known = {row["id"] for row in firing}
    counted = queries.counts(user, AlertFilter())
    context = {
        "firing": [_shown(request, row) for row in firing],
        "recent": [_shown(request, row) for row in recent if row["id"] not in known],
        "newest": max((row["opened_at"] for row in (*firing, *recent)), default=""),
        "number": counted["firing"],
    }
    return render(request, "alerts/_panel.html", context)


@require_safe
@never_cache
def summary(request: HttpRequest) -> JsonResponse:
    """The number beside the bell."""
    return JsonResponse({"unread": queries.unread(reader(request))})


@require_POST
def read(request: HttpRequest) -> HttpResponse:
    """Mark the alerts up to the one that opened at ``until`` as read."""
    user = reader(request)
    until = None
    if text := request.POST.get("until", ""):
        try:
            until = parse_datetime(text[:40])
        except ValueError:  # well formatted, but no date
            until = None
        if until is None or until.tzinfo is None:
            return HttpResponse(
                "expected a time in ISO 8601", status=422, content_type="text/plain"
            )
    actions.mark_read(user, until=until)
    if "application/json" in request.headers.get("Accept", ""):
        return JsonResponse({"unread": queries.unread(user)})
    return redirect("alerts")


def _shown(request: HttpRequest, row: dict[str, Any]) -> dict[str, Any]:
    """A row, with its link, and whether the user can acknowledge it."""
    owned = row["owner"] == request.user.get_username()
    roles = ("admin", "operator") if owned else ("admin",)
    can = row["run"] is not None and row["acknowledged_at"] is None
    return {
        **row,
        "place": place(row),
        "can_acknowledge": can and permissions.has_role(request.user, *roles),
    }


def _filter(request: HttpRequest) -> AlertFilter:
    """The filters of an address. A value that no column can hold matches no alert."""
    kind, run, owner = (text_of(request.GET, name)[:150] for name in ("kind", "run", "owner"))
    run = run.lower()
    firing = request.GET.get("show", "") != "recent"
    if run and not re.fullmatch(UUID, run):
        run = "00000000-0000-0000-0000-000000000000"
    return AlertFilter(firing=firing, kind=kind[:24], run=run, owner=owner)


def _address(chosen: AlertFilter, **more: str) -> str:
    """The query string of filters; at least ``?``, so that it works as a link."""
    values = {"kind": chosen.kind, "run": chosen.run, "owner": chosen.owner}
    if not chosen.firing:
        values["show"] = "recent"
    values |= more
    return f"?{urlencode({name: value for name, value in values.items() if value})}"
