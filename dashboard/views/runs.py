"""The runs list: one query, any order, keyset pages, kept live by one stream.

All that filters and sorts is in the address: ``/?q=state:running+loss<3&sort=-cost``. A query that
is not understood shows no runs, and says why at its box. Nothing moves by itself: runs that come
while somebody looks are counted, by the same query.
"""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import urlencode

from django.db.models import prefetch_related_objects
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from runs import live, selectors
from runs.models import Run
from runs.queries import listing
from runs.queries.listing import NEWEST, Order
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

PAGE_SIZE = 50
SPARK = (72, 20)

COLUMNS = (
    # label, sort, whether a first press sorts downwards, class
    ("State", "", False, ""),
    ("Run", "name", False, ""),
    ("Replicas", "", False, ""),
    ("Rounds", "rounds", True, ""),
    ("Eval loss", "loss", False, "num"),
    ("Train loss", "train", False, "num"),
    ("Tokens", "tokens", True, "num"),
    ("Tokens/s", "", False, "num"),
    ("Goodput", "", False, "num"),
    ("Cost", "cost", True, "num"),
    ("Started", "started", True, "num"),
    ("Ran for", "", False, "num"),
)


@require_safe
@never_cache
def runs(request: HttpRequest) -> HttpResponse:
    cursor = live.latest_id()  # before the rows are read, so that no delta falls between
    now = timezone.now()
    query, order = request.GET.get("q", "").strip(), Order.of(request.GET.get("sort", NEWEST))
    terms: tuple[Term, ...] = ()
    error, rows, older = None, [], ""
    after = request.GET.get("before", "")
    try:
        terms = parse(query)
    except BadQuery as bad:
        error = bad
    else:
        visible = matching(selectors.runs_for(request.user), terms, user=request.user)
        found, older = listing.page(visible, order, after=after, limit=PAGE_SIZE)
        rows = rows_of(found)
    context = {
        "rows": rows,
        "older": older,
        "first_page": not listing.is_place(order, after),
        "cursor": cursor,
        "now": now,
        "may_submit": selectors.may_submit(request.user),
        "may_look": selectors.may_look(request.user),
        "all_archived": not rows and not query and selectors.runs_for(request.user).exists(),
        "query": query,
        "error": error,
        "sort": str(order),
        "filtered": bool(query),
        "chips": [{"term": t, "address": _address(without(terms, t), order)} for t in terms],
        "columns": _columns(query, order),
        "here": _address(query, order),
        "facets": _facets(request, terms, order) if "facets" in request.GET and not error else None,
        "texts": TEXTS,
        "numbers": tuple(NUMBERS),
        "is_words": IS,
    }
    return render(request, "runs/list.html", context, status=422 if error else 200)


@require_safe
@never_cache
def runs_json(request: HttpRequest) -> JsonResponse:
    """Headers of the page that is shown: what the list polls when there is no stream. ``new`` is
    how many that the query finds were made after ``since``."""
    order = Order.of(request.GET.get("sort", NEWEST))
    try:
        terms = parse(request.GET.get("q", "").strip())
    except BadQuery as bad:
        return JsonResponse({"error": str(bad)}, status=422)
    visible = matching(selectors.runs_for(request.user), terms, user=request.user)
    found, _ = listing.page(visible, order, after=request.GET.get("before", ""), limit=PAGE_SIZE)
    body: dict[str, Any] = {"runs": [selectors.run_header(run) for run in found]}
    if since := _moment(request.GET.get("since", "")):
        body["new"] = visible.filter(created_at__gt=since).order_by().count()
    return JsonResponse(body)


@require_safe
@never_cache
def runs_facets(request: HttpRequest) -> HttpResponse:
    """What the query can be narrowed to: asked for when somebody opens the filters."""
    try:
        terms = parse(request.GET.get("q", "").strip())
    except BadQuery:
        terms = ()
    order = Order.of(request.GET.get("sort", NEWEST))
    return render(request, "runs/_facets.html", {"facets": _facets(request, terms, order)})


def rows_of(found: list[Run]) -> list[dict[str, Any]]:
    curves = listing.sparks(found)
    pools = _backends(found)
    return [
        {
            "header": _header(run),
            "backends": pools.get(run.pk, ""),
            "tags": run.tags,
            "archived": run.archived_at is not None,
            "spark": _spark(curves.get(run.pk, [])),
        }
        for run in found
    ]


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


def _columns(query: str, order: Order) -> list[dict[str, Any]]:
    columns = []
    for label, name, falls, style in COLUMNS:
        mine = name == order.name and bool(name)
        falling = not order.falling if mine else falls
        columns.append(
            {
                "label": label,
                "style": style,
                "address": _address(query, Order(name=name, falling=falling)) if name else "",
                "sorted": ("descending" if order.falling else "ascending") if mine else "",
            }
        )
    return columns


def _facets(request: HttpRequest, terms: tuple[Term, ...], order: Order) -> list[dict[str, Any]]:
    if not selectors.may_look(request.user):
        return []
    found = listing.facets(terms, user=request.user)
    return [
        {
            "name": name,
            "choices": [
                {"choice": c, "address": _address(toggled(terms, name, c.value), order)}
                for c in choices
            ],
        }
        for name, choices in found.items()
    ]


def _address(query: str, order: Order) -> str:
    """Of the first page; relative, so that it is ``?`` at least."""
    values = {"q": query} if query else {}
    if str(order) != NEWEST:
        values["sort"] = str(order)
    return f"?{urlencode(values)}"


def _moment(text: str) -> Any:
    try:
        moment = parse_datetime(text)
    except ValueError:
        return None
    return moment if moment and moment.tzinfo else None
