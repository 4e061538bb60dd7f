"""The runs list: search, sort, columns and keyset pages, updated by one live stream.

The URL holds the query, the order and the columns (:mod:`dashboard.list_address`):
``/?q=state:running+loss<3&sort=-cost&columns=state,name,cost``; ``group=tag`` lists groups with
totals instead. An invalid query shows no runs and an error at the search field. Rows never move by
themselves: new runs that match the query are only counted.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.safestring import SafeString
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from dashboard.list_address import ListAddress
from dashboard.live.cursor import follows_stream
from dashboard.presentation import formats, list_frame, run_rows
from dashboard.views.view_menu import list_view_menu
from runs import permissions
from runs.backends import health, storage_health
from runs.json_values import texts
from runs.models import Run
from runs.queries import completion, groups, listing, selectors, table, totals
from runs.queries.comparison import Difference
from runs.queries.listing import Order
from runs.queries.search import (
    IS,
    LONGEST,
    NUMBERS,
    TEXTS,
    BadQuery,
    Term,
    corrected,
    matching,
    parse,
    toggled,
    without,
)
from runs.states import RUN_LIVE, RunState
from runs.times import in_utc

PAGE_SIZE = 50
SPARK = (72, 20)
TAGS_SHOWN = 4
WHY_LENGTH = 1000
TABS = {"active": "Active", "mine": "Mine", "failed": "Failed", "all": "All"}


STRIP = (
    ("active_runs", "active", "Listed runs that have not ended"),
    ("gpus", "in use", "GPUs of the replicas' jobs that run now; + if some are unknown"),
    ("rate", "an hour", "Price of the replicas' jobs that run now; + if some prices are unknown"),
    (
        "today",
        "spent today",
        "Spent by the listed runs since midnight in UTC, as on Spend; + if prices are unknown",
    ),
    ("alerts", "open", "Open alerts of the listed runs, acknowledged or not"),
    ("runs", "listed", "Runs that match the query"),
    ("cost", "spent in all", "Cost of the listed runs since their start"),
)
"""Figures above the list: name, label and explanation."""


@require_safe
@never_cache
@follows_stream
def runs(request: HttpRequest) -> HttpResponse:
    now = timezone.now()
    address = ListAddress.of(request.GET)
    terms: tuple[Term, ...] = ()
    error, older = None, ""
    page: list[Run] = []
    after = request.GET.get("before", "")
    try:
        terms = parse(address.query)
    except BadQuery as bad:
        error = bad
    else:
        if address.group:
            return _grouped(request, terms, address)
        # Any column can differ.
        every = selectors.runs_for if address.differing else selectors.listed_runs
        visible = matching(every(request.user), terms, user=request.user)
        page, older = listing.page(visible, address.order, after=after, limit=PAGE_SIZE)
    rows = rows_of(page, address)
    with_totals = "totals" in request.GET and not error
    differing, more_differing = table.differing(page) if address.differing else ([], 0)
    context = _frame(request, terms, address, with_totals=with_totals) | {
        "rows": rows,
        "rows_html": _html(rows, address.columns, differing),
        "differing": differing,
        "more_differing": more_differing,
        "older": older,
        "first_page": not listing.is_place(address.order, after),
        "now": now,
        "stale": sum(row.stale for row in rows),
        "stale_after_s": health.STALE_RUN_S,
        "all_archived": not rows
        and not address.query
        and selectors.visible_runs(request.user).exists(),
        "error": error,
        "corrected": address.but(query=corrected(address.query, error)) if error else None,
        "heads": _heads(address),
    }
    if "facets" in request.GET and not error:
        context |= _facets(request, terms, address)
    return render(request, "runs/list.html", context, status=422 if error else 200)


def _grouped(request: HttpRequest, terms: tuple[Term, ...], address: ListAddress) -> HttpResponse:
    """The list as groups with totals; with ``?part=1`` only the table, which changes."""
    found = groups.groups(request.user, terms, address.group)
    ungrouped = address.but(group="")
    for row in (*found["groups"], found["total"]):
        query = f"{address.query} {row['query']}".strip() if row["query"] else ""
        row["address"] = ungrouped.but(query=query) if query else ""
        row["rate"] = formats.rate(row["usd_h"], row["usd_h_known"])
        row["cost"] = formats.spent(row["cost_usd"], row["cost_known"])
    context = {"groups": found, "group_label": groups.BY[address.group], "most": groups.MOST_RUNS}
    if request.GET.get("part"):
        return render(request, "runs/_groups.html", context)
    context |= _frame(request, terms, address, with_totals="totals" in request.GET)
    context |= {"first_page": True, "stale": 0}
    if "facets" in request.GET:
        context |= _facets(request, terms, address)
    return render(request, "runs/list.html", context)


def _frame(
    request: HttpRequest, terms: tuple[Term, ...], address: ListAddress, *, with_totals: bool
) -> dict[str, Any]:
    """What is around the rows: the search, the menus, the tabs, and the banners."""
    sums = _totals(request, terms) if with_totals else {}
    return {
        "storage": storage_health.storage_problem(),
        "silent_since": health.silent_since(),
        "can_submit": permissions.can_submit(request.user),  # also the permission to share views
        "can_view": permissions.can_view(request.user),
        "query": address.query,
        "sort": str(address.order),
        "filtered": bool(address.query),
        "chips": [{"term": t, "address": address.but(query=without(terms, t))} for t in terms],
        "shown": address.columns,
        "column_choices": list_frame.column_choices(address.columns),
        "written_columns": table.written(address.columns),
        "here": address,
        "no_query": address.but(query=""),
        "plain": address.but(columns=table.DEFAULT, differing=False),
        **list_view_menu(request, address),
        "texts": TEXTS,
        "numbers": tuple(NUMBERS),
        "is_words": IS,
        "totals": sums,
        "strip": _strip(request.user, terms, address, sums),
        "tabs": _tabs(terms, address, sums),
        "group_choices": [
            {"label": label, "address": address.but(group=by), "chosen": by == address.group}
            for by, label in {"": "None", **groups.BY}.items()
        ],
    }


@require_safe
@never_cache
def runs_complete(request: HttpRequest) -> JsonResponse:
    """Completions of the query up to the cursor, for the search field."""
    found = completion.completions(request.user, request.GET.get("q", ""))
    return JsonResponse({"completions": [dataclasses.asdict(each) for each in found]})


@require_safe
@never_cache
def runs_json(request: HttpRequest) -> JsonResponse:
    """Headers of the runs on the page, for polling without a stream. ``new`` is the number of
    matching runs created after ``since``."""
    address = ListAddress.of(request.GET)
    try:
        terms = parse(address.query)
    except BadQuery as bad:
        return JsonResponse({"error": str(bad)}, status=422)
    visible = matching(selectors.listed_runs(request.user), terms, user=request.user)
    after = request.GET.get("before", "")
    page, _ = listing.page(visible, address.order, after=after, limit=PAGE_SIZE)
    body: dict[str, Any] = {
        "runs": [selectors.run_header(run) for run in page],
        "silent_since": health.silent_since(),
    }
    if since := _moment(request.GET.get("since", "")):
        body["new"] = visible.filter(created_at__gt=since).order_by().count()
    return JsonResponse(body)


@require_safe
@never_cache
def runs_facets(request: HttpRequest) -> HttpResponse:
    """Filters of the query, loaded when the user opens the filter menu."""
    address = ListAddress.of(request.GET)
    try:
        terms = parse(address.query)
    except BadQuery:
        terms = ()
    return render(request, "runs/_facets.html", _facets(request, terms, address))


@require_safe
@never_cache
def runs_totals(request: HttpRequest) -> JsonResponse:
    """Texts of the tabs and of the strip, by name. The page loads them after its rows."""
    try:
        terms = parse(ListAddress.of(request.GET).query)
    except BadQuery as bad:
        return JsonResponse({"error": str(bad)}, status=422)
    return JsonResponse(_totals(request, terms))


def rows_of(runs: list[Run], address: ListAddress) -> list[run_rows.Row]:
    now, columns = timezone.now(), address.columns
    curves = listing.sparks(runs) if "loss" in columns else {}
    pools = listing.backends(runs, whole=address.differing)
    pages = _pages(runs)
    return [
        _row(
            run,
            now,
            columns,
            address=pages[run.pk],
            backends=pools.get(run.pk, ""),
            spark=_spark(curves.get(run.pk, [])),
        )
        for run in runs
    ]


def _pages(runs: list[Run]) -> dict[uuid.UUID, str]:
    """Addresses of the pages of runs, with one call of ``reverse``, which takes long."""
    some = uuid.UUID(int=0)
    address = reverse("run", args=[some])
    return {run.pk: address.replace(str(some), str(run.pk)) for run in runs}


def _row(
    run: Run, now: datetime, columns: Sequence[str], *, address: str, backends: str, spark: str
) -> run_rows.Row:
    header, tags = selectors.run_header(run), texts(run.tags)
    place = {"owner": header["owner"], "backends": backends}
    seen = run.last_seen_at if run.state in RUN_LIVE else None
    return run_rows.Row(
        header=header,
        address=address,
        place=" · ".join(text for name, text in place.items() if text and name in columns),
        tags=tags[:TAGS_SHOWN],
        more_tags=tags[TAGS_SHOWN:],
        why=formats.in_short(run.state_reason)[:WHY_LENGTH] if run.state == RunState.FAILED else "",
        archived=run.archived_at is not None,
        deleting=run.delete_requested_at is not None,
        seen=seen.isoformat() if seen else "",
        stale=health.is_stale(run, now=now),
        spark=spark,
        ran_s=_ran_s(run, now),
    )


def _ran_s(run: Run, now: datetime) -> float | None:
    return ((run.ended_at or now) - run.started_at).total_seconds() if run.started_at else None


def _spark(values: list[float]) -> str:
    """``points`` of an SVG polyline; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    width, height = SPARK
    low, span = min(values), max(values) - min(values) or 1.0
    step = width / (len(values) - 1)
    return " ".join(
        f"{i * step:.1f},{1 + (height - 2) * (1 - (v - low) / span):.1f}"
        for i, v in enumerate(values)
    )


def _html(
    rows: Sequence[run_rows.Row], columns: tuple[str, ...], differing: Sequence[Difference]
) -> list[SafeString]:
    return [
        run_rows.html(row, columns, [(d.label, d.values[index]) for d in differing])
        for index, row in enumerate(rows)
    ]


def _heads(address: ListAddress) -> SafeString:
    """Heads of the visible columns, with sort links. Those of a query that is too long are not
    kept."""
    long = len(address.query) > LONGEST
    return _made_heads.__wrapped__(address) if long else _made_heads(address)


@lru_cache(maxsize=256)
def _made_heads(address: ListAddress) -> SafeString:
    heads = []
    for column in table.COLUMNS:
        if column.below or column.name not in address.columns:
            continue
        is_sorted = column.sort == address.order.name and bool(column.sort)
        falling = not address.order.falling if is_sorted else column.falls
        order = Order(name=column.sort, falling=falling)
        heads.append(
            list_frame.Head(
                label=column.label,
                number=column.number,
                address=str(address.but(order=order)) if column.sort else "",
                sorted=("descending" if address.order.falling else "ascending")
                if is_sorted
                else "",
            )
        )
    return SafeString("".join(head.html() for head in heads))


def _tabs(
    terms: tuple[Term, ...], address: ListAddress, sums: dict[str, str]
) -> list[dict[str, Any]]:
    selected = totals.tabs_of(terms)
    return [
        {
            "name": tab,
            "label": label,
            "address": address.but(query=totals.query_of(tab, terms)),
            "selected": tab in selected,
            "count": sums.get(tab, ""),
        }
        for tab, label in TABS.items()
    ]


def _totals(request: HttpRequest, terms: tuple[Term, ...]) -> dict[str, str]:
    """Texts by name: the number of runs of each tab, and the figures of the strip."""
    if not permissions.can_view(request.user):
        return {}
    runs = matching(selectors.visible_runs(request.user), terms, user=request.user)
    total = totals.totals(runs, now=timezone.now())
    tabs = totals.tab_counts(terms, user=request.user)
    return {
        **{tab: formats.count(count) for tab, count in tabs.items()},
        "active_runs": formats.count(total.active),
        "gpus": f"{formats.lower_bound(total.gpus, total.gpus_known)} {_plural(total.gpus, 'GPU')}",
        "rate": formats.rate(total.usd_h, total.usd_h_known),
        "today": formats.spent(total.today_usd, total.today_known),
        "alerts": f"{formats.count(total.alerts)} {_plural(total.alerts, 'alert')}",
        "runs": f"{formats.count(total.runs)} {_plural(total.runs, 'run')}",
        "cost": formats.spent(total.cost_usd, total.cost_known),
    }


def _plural(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"


def _strip(
    user: AbstractBaseUser | AnonymousUser,
    terms: tuple[Term, ...],
    address: ListAddress,
    sums: dict[str, str],
) -> SafeString:
    """The figures above the list, with their explanations and links. A page of all runs shows
    those of the owner whom the query names."""
    owners = [_owner_of(term, user) for term in terms]
    owner = next(filter(None, owners), "")

    def page(name: str, **values: str) -> str:
        query = urlencode({k: v for k, v in {**values, "owner": owner}.items() if v})
        return f"{reverse(name)}{'?' if query else ''}{query}"

    addresses = {
        "active_runs": str(address.but(query=totals.query_of("active", terms))),
        "gpus": page("fleet"),
        "rate": page("fleet"),
        "today": page("spend", days="1"),
        "alerts": page("alerts"),
    }
    figures = (
        list_frame.Figure(
            name=name,
            label=label,
            help=help,
            text=sums.get(name, ""),
            address=addresses.get(name, ""),
        )
        for name, label, help in STRIP
    )
    return SafeString("".join(figure.html() for figure in figures))


def _owner_of(term: Term, user: AbstractBaseUser | AnonymousUser) -> str:
    """The only owner whose runs match a term; '' if it does not name one."""
    if term.negated or len(term.values) != 1:
        return ""
    if term.field == "is" and term.values[0].lower() == "mine":
        return user.get_username()
    if term.field != "owner":
        return ""
    same = User.objects.filter(username__iexact=term.values[0]).values_list("username", flat=True)
    found = list(same[:2])
    return found[0] if len(found) == 1 else term.values[0]


def _facets(request: HttpRequest, terms: tuple[Term, ...], address: ListAddress) -> dict[str, Any]:
    if not permissions.can_view(request.user):
        return {"facets": []}
    facets = listing.facets(terms, user=request.user)
    return {
        "facets": [
            {
                "name": name,
                "choices": [
                    {"choice": c, "address": address.but(query=toggled(terms, name, c.value))}
                    for c in choices
                ],
            }
            for name, choices in facets.choices.items()
        ],
        "counted": None if facets.whole else listing.COUNTED,
    }


def _moment(text: str) -> Any:
    try:
        moment = parse_datetime(text)
    except ValueError:
        return None
    return in_utc(moment) if moment and moment.tzinfo else None
