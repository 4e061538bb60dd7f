"""The runs list: one query, any order, keyset pages, kept live by one stream.

All that filters, sorts and chooses columns is in the address (:mod:`dashboard.list_address`):
``/?q=state:running+loss<3&sort=-cost&columns=state,name,cost``. A query that is not understood
shows no runs, and says why at its box. Nothing moves by itself: runs that come while somebody looks
are counted, by the same query.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.db.models import prefetch_related_objects
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from dashboard.list_address import ListAddress
from dashboard.presentation import badges
from runs import live_stream, permissions
from runs.actions import saved_views
from runs.backends import health, storage_health
from runs.json_values import texts
from runs.models import Run
from runs.queries import listing, selectors, table
from runs.queries.comparison import Difference
from runs.queries.listing import Order
from runs.queries.search import (
    IS,
    NUMBERS,
    TEXTS,
    BadQuery,
    Term,
    matching,
    parse,
    toggled,
    without,
)
from runs.states import RUN_LIVE

PAGE_SIZE = 50
SPARK = (72, 20)


@require_safe
@never_cache
def runs(request: HttpRequest) -> HttpResponse:
    cursor = live_stream.latest_id()  # before the rows are read, so that no delta falls between
    now = timezone.now()
    here = ListAddress.of(request.GET)
    terms: tuple[Term, ...] = ()
    error, older = None, ""
    found: list[Run] = []
    after = request.GET.get("before", "")
    try:
        terms = parse(here.query)
    except BadQuery as bad:
        error = bad
    else:
        visible = matching(selectors.runs_for(request.user), terms, user=request.user)
        found, older = listing.page(visible, here.order, after=after, limit=PAGE_SIZE)
    rows = rows_of(found)
    differing, more_differing = table.differing(found) if here.differing else ([], 0)
    context = {
        "rows": _with_differing(rows, differing),
        "differing": differing,
        "more_differing": more_differing,
        "older": older,
        "first_page": not listing.is_place(here.order, after),
        "cursor": cursor,
        "now": now,
        "storage": storage_health.storage_problem(),
        "silent_since": health.silent_since(),
        "stale": sum(row["stale"] for row in rows),
        "stale_after_s": health.STALE_RUN_S,
        "may_submit": permissions.may_submit(request.user),  # and may share views
        "may_look": permissions.may_look(request.user),
        "all_archived": not rows and not here.query and selectors.runs_for(request.user).exists(),
        "query": here.query,
        "error": error,
        "sort": str(here.order),
        "filtered": bool(here.query),
        "chips": [{"term": t, "address": here.but(query=without(terms, t))} for t in terms],
        "columns": _columns(here),
        "shown": here.columns,
        "every_column": table.COLUMNS,
        "written_columns": table.written(here.columns),
        "here": here,
        "no_query": here.but(query=""),
        "plain": here.but(columns=table.DEFAULT, differing=False),
        "views": _views(request, here),
        "texts": TEXTS,
        "numbers": tuple(NUMBERS),
        "is_words": IS,
    }
    if "facets" in request.GET and not error:
        context |= _facets(request, terms, here)
    return render(request, "runs/list.html", context, status=422 if error else 200)


@require_safe
@never_cache
def runs_json(request: HttpRequest) -> JsonResponse:
    """Headers of the page that is shown: what the list polls when there is no stream. ``new`` is
    how many that the query finds were made after ``since``."""
    here = ListAddress.of(request.GET)
    try:
        terms = parse(here.query)
    except BadQuery as bad:
        return JsonResponse({"error": str(bad)}, status=422)
    visible = matching(selectors.runs_for(request.user), terms, user=request.user)
    after = request.GET.get("before", "")
    found, _ = listing.page(visible, here.order, after=after, limit=PAGE_SIZE)
    body: dict[str, Any] = {
        "runs": [selectors.run_header(run) for run in found],
        "silent_since": health.silent_since(),
    }
    if since := _moment(request.GET.get("since", "")):
        body["new"] = visible.filter(created_at__gt=since).order_by().count()
    return JsonResponse(body)


@require_safe
@never_cache
def runs_facets(request: HttpRequest) -> HttpResponse:
    """What the query can be narrowed to: asked for when somebody opens the filters."""
    here = ListAddress.of(request.GET)
    try:
        terms = parse(here.query)
    except BadQuery:
        terms = ()
    return render(request, "runs/_facets.html", _facets(request, terms, here))


def rows_of(found: list[Run]) -> list[dict[str, Any]]:
    now = timezone.now()
    curves = listing.sparks(found)
    pools = _backends(found)
    return [
        {
            "header": _header(run),
            "backends": pools.get(run.pk, ""),
            "tags": texts(run.tags),
            "archived": run.archived_at is not None,
            "deleting": run.delete_requested_at is not None,
            "seen": run.last_seen_at.isoformat()
            if run.last_seen_at and run.state in RUN_LIVE
            else "",
            "stale": health.is_stale(run, now=now),
            "tone": badges.look(run.state).tone,
            "ran_s": _ran_s(run, now),
            "spark": _spark(curves.get(run.pk, [])),
        }
        for run in found
    ]


def _ran_s(run: Run, now: datetime) -> float | None:
    return ((run.ended_at or now) - run.started_at).total_seconds() if run.started_at else None


def _backends(found: list[Run]) -> dict[uuid.UUID, str]:
    prefetch_related_objects(found, "pools")
    return {
        run.pk: ", ".join(dict.fromkeys(pool.backend for pool in run.pools.all())) for run in found
    }


def _header(run: Run) -> dict[str, Any]:
    header = selectors.run_header(run)
    total = header["total_rounds"]
    header["fraction"] = f"{header['committed_rounds'] / total:.4f}" if total else "0"
    return header


def _spark(values: list[float]) -> str:
    """``points`` of a polyline; '' for fewer than two values."""
    if len(values) < 2:
        return ""
    width, height = SPARK
    low, span = min(values), max(values) - min(values) or 1.0
    step = width / (len(values) - 1)
    return " ".join(
        f"{i * step:.1f},{1 + (height - 2) * (1 - (v - low) / span):.1f}"
        for i, v in enumerate(values)
    )


def _with_differing(
    rows: list[dict[str, Any]], differing: Sequence[Difference]
) -> list[dict[str, Any]]:
    for place, row in enumerate(rows):
        row["differing"] = [(d.label, d.values[place]) for d in differing]
    return rows


def _columns(here: ListAddress) -> list[dict[str, Any]]:
    """The heads of the columns that are shown, of which one may be the order."""
    heads = []
    for column in table.COLUMNS:
        if column.below or column.name not in here.columns:
            continue
        mine = column.sort == here.order.name and bool(column.sort)
        falling = not here.order.falling if mine else column.falls
        order = Order(name=column.sort, falling=falling)
        heads.append(
            {
                "label": column.label,
                "style": "num" if column.number else "",
                "address": here.but(order=order) if column.sort else "",
                "sorted": ("descending" if here.order.falling else "ascending") if mine else "",
            }
        )
    return heads


def _views(request: HttpRequest, here: ListAddress) -> list[dict[str, Any]]:
    """Saved ones, each with where it leads and what may be done with it; ``shown`` now or not."""
    views = list(saved_views.views_for(request.user))
    others = any(view.owner_id != request.user.pk for view in views)
    admin = others and permissions.has_role(request.user, "admin")
    found = []
    for view in views:
        address, mine = ListAddress.of_view(view), view.owner_id == request.user.pk
        found.append(
            {
                "view": view,
                "address": address,
                "mine": mine,
                "may_delete": mine or admin,
                "shown": address == here,
            }
        )
    return found


def _facets(request: HttpRequest, terms: tuple[Term, ...], here: ListAddress) -> dict[str, Any]:
    if not permissions.may_look(request.user):
        return {"facets": []}
    found = listing.facets(terms, user=request.user)
    return {
        "facets": [
            {
                "name": name,
                "choices": [
                    {"choice": c, "address": here.but(query=toggled(terms, name, c.value))}
                    for c in choices
                ],
            }
            for name, choices in found.choices.items()
        ],
        "counted": None if found.whole else listing.COUNTED,
    }


def _moment(text: str) -> Any:
    try:
        moment = parse_datetime(text)
    except ValueError:
        return None
    return moment if moment and moment.tzinfo else None
