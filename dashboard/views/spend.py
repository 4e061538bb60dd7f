"""Spending by day, backend, owner, run and tag: ``/spend?days=30`` or ``?from=…&to=…``.

The server draws the chart, so the page needs no script. The part that changes is fetched again when
the live stream reports a change of any run.
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from dashboard.live.cursor import follows_stream
from dashboard.presentation.day_chart import day_chart
from dashboard.views.access import reader
from dashboard.views.fleet import job_filter
from executors.registry import BACKENDS
from runs.backends import health, storage_health
from runs.queries import spend as queries
from runs.queries.attempt_costs import LONGEST_DAYS, Period
from runs.queries.live_jobs import JobFilter

LABELS = {**BACKENDS, queries.TRAFFIC: queries.TRAFFIC_LABEL}
DEFAULT_DAYS = 7
QUICK = (7, 30, 90)
"""Periods that are one click away, in days."""
TABLES = (
    ("backends", "Backend", "backend"),
    ("owners", "Owner", "owner"),
    ("runs", "Run", ""),
    ("tags", "Tag", ""),
)
"""Part of the row, head of its column, and the filter that a row sets."""


@require_safe
@never_cache
@follows_stream
def spend(request: HttpRequest) -> HttpResponse:
    user = reader(request)
    now = timezone.now()
    today = now.date()
    period, error = _period(request, today)
    chosen = job_filter(request).but(state="")
    row = queries.spend(user, period, chosen, now=now)
    monday = today - timedelta(days=today.weekday())
    last_week = Period(first=monday - timedelta(days=7), last=monday - timedelta(days=1))
    order = [name for name in LABELS if any(name in day["backends"] for day in row["days"])]
    order += sorted({name for day in row["days"] for name in day["backends"]} - set(order))
    context = {
        "spend": row,
        "period": period,
        "error": error,
        "number": len(row["days"]),
        "today": today,
        "quick": [
            *(
                (f"{days} days", _address(chosen, days=str(days)), Period.until(today, days=days))
                for days in QUICK
            ),
            *(
                (label, _address(chosen, **_dates(quick)), quick)
                for label, quick in (
                    ("Last week", last_week),
                    ("This month", Period(first=today.replace(day=1), last=today)),
                )
            ),
        ],
        "tables": [_table(row[name], head, kind, chosen, period) for name, head, kind in TABLES],
        "chart": day_chart(row["days"], order, LABELS),
        "backends": [(name, LABELS.get(name, name)) for name in order],
        "days": [
            {**day, "cells": [day["backends"].get(name) for name in order]}
            for day in reversed(row["days"])
        ],
        "chosen": chosen,
        "filtered": chosen != JobFilter(),
        "unfiltered": _address(JobFilter(), **_dates(period)),
        "file": _address(chosen, **_dates(period)),
        "most": queries.MOST_ATTEMPTS,
        "storage": storage_health.storage_problem(),
        "silent_since": health.silent_since(),
        "now": now,
    }
    part = "spend/_spend.html" if request.GET.get("part") else "spend/spend.html"
    return render(request, part, context, status=422 if error else 200)


def _period(request: HttpRequest, today: date) -> tuple[Period, str]:
    """The period of an address, or the default one and what is wrong with the address."""
    try:
        period = _asked(request, today)
    except ValueError as error:
        return Period.until(today), str(error)
    problem = period.problem(today=today)
    return (Period.until(today), problem) if problem else (period, "")


def _asked(request: HttpRequest, today: date) -> Period:
    """Parse an address. Raises ``ValueError``."""
    first, last, days = (request.GET.get(name, "") for name in ("from", "to", "days"))
    number = days if days.isascii() and days.isdecimal() and len(days) < 5 else "0"
    if days and not 1 <= int(number) <= LONGEST_DAYS:
        raise ValueError(f"expected 1 to {LONGEST_DAYS} days, found {days[:40]!r}")
    try:
        return Period.until(
            _day(last) if last else today,
            first=_day(first) if first else None,
            days=int(days) if days else DEFAULT_DAYS,
        )
    except OverflowError:
        raise ValueError(f"expected a later day, found {last}") from None


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"expected a day such as 2026-01-31, found {text[:40]!r}") from None


def _dates(period: Period) -> dict[str, Any]:
    return {"from": period.first, "to": period.last}


def _address(chosen: JobFilter, **more: Any) -> str:
    values = {"backend": chosen.backend, "owner": chosen.owner, **more}
    return f"?{urlencode({name: value for name, value in values.items() if value})}"


def _table(
    rows: list[dict[str, Any]], head: str, kind: str, chosen: JobFilter, period: Period
) -> dict[str, Any]:
    """A table of groups. ``share`` is the length of a row's bar."""
    largest = max((row["usd"] or 0.0 for row in rows), default=0.0)
    result = []
    for row in rows:
        sets = kind and not row["others"]
        filtered = chosen.but(**{kind: row["key"]}) if sets else chosen
        result.append(
            {
                **row,
                "address": _address(filtered, **_dates(period)) if sets else "",
                "share": f"{(row['usd'] or 0.0) / largest:.4f}" if largest else "0",
            }
        )
    return {"head": head, "kind": head.lower(), "rows": result}
