"""The source of the submit form: a template, a clone of a run, or a fork of one of its rounds.

*Source* is a form that reloads the page: it redirects to the equivalent address (``?template=``,
``?clone=<run>``, ``?fork=<run>&round=<r>``), which other pages link to as well.

The lists offer the newest runs. *Find* searches for others with the query language of the runs list
(:mod:`runs.queries.search`). Its button posts the whole form, so that no input is lost; an address
can search too (``?find_clone=``, ``?find_fork=``).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.db.models import QuerySet
from django.http import Http404, HttpRequest

from dashboard.views.access import run_to_see
from runs.models import Run
from runs.queries import run_page, selectors
from runs.queries.search import BadQuery, matching, parse
from runs.submit import clone_and_fork
from runs.submit.run_draft import TEMPLATES, RunDraft

KINDS = ("template", "clone", "fork")
OFFERED = 50
"""Number of newest runs that are offered; others can be searched for."""
SEARCHED = ("clone", "fork")
ENTER = "enter"
"""Value of the button that the browser presses on Enter in any field."""


def searched(sent: Mapping[str, str]) -> str:
    """The list to search, or '' for none. Enter in *Find* presses the first button of the form, so
    a query that changed since the last response is searched for."""
    if sent.get("search") in SEARCHED:
        return sent["search"]
    if sent.get("dry_run") != ENTER:
        return ""
    changed = (
        kind for kind in SEARCHED if sent.get(f"find_{kind}", "") != sent.get(f"found_{kind}", "")
    )
    return next(changed, "")


def address(query: Mapping[str, str]) -> str | None:
    """Query string equivalent to the posted *Source*; None if it was not posted."""
    if "source" not in query:
        return None
    kind = query["source"]
    chosen = {kind: query.get(kind, "")} if kind in KINDS else {}
    if kind == "fork" and query.get("round"):
        chosen["round"] = query["round"]
    return urlencode({name: value for name, value in chosen.items() if value})


def kind_of(query: Mapping[str, str]) -> str:
    return next((kind for kind in ("fork", "clone") if kind in query), "template")


def cloned(query: Mapping[str, str]) -> str:
    """The id of the run whose values fill the form, whether it is cloned or forked."""
    kind = kind_of(query)
    return "" if kind == "template" else query.get(kind, "")


def draft_of(request: HttpRequest) -> RunDraft | None:
    """The draft that the address refers to; None if it refers to none."""
    query, kind = request.GET, kind_of(request.GET.dict())
    if kind == "template":
        template = TEMPLATES.get(query.get("template", ""))
        return template.make() if template else None
    try:
        pk = uuid.UUID(query[kind])
    except ValueError:
        raise Http404 from None
    run = run_to_see(request, pk)
    if kind == "clone":
        return clone_and_fork.clone_of(run)
    rounds = clone_and_fork.forkable(run)
    if not rounds:
        messages.info(request, f"{run.name} has no checkpoint to fork, so this is a clone.")
        return clone_and_fork.clone_of(run)
    wanted = query.get("round", "")
    known = {str(number): number for number in rounds}
    chosen = known.get(wanted, rounds[0])
    if wanted and str(chosen) != wanted:
        messages.warning(request, f"Round {wanted[:20]} has no checkpoint.")
    return clone_and_fork.fork_of(run, chosen)


def offered(request: HttpRequest) -> dict[str, Any]:
    """Template context: the options and the current choice. Two queries."""
    query = request.GET.dict()
    kind = kind_of(query)
    # Only an id that draft_of has checked: it is valid and the user can see the run.
    chosen = {kind: query.get(kind, "")}
    sent = query | request.POST.dict()
    searches = {name: sent.get(f"find_{name}", "").strip() for name in SEARCHED}
    runs = selectors.runs_for(request.user)
    shown = searched(sent) or next((name for name in SEARCHED if searches[name]), kind)
    return {
        "kind": shown if "search" in sent or any(searches.values()) else kind,
        "chosen": chosen[kind],
        "round": query.get("round", ""),
        "templates": [(name, template.label) for name, template in TEMPLATES.items()],
        "clone": _choice(request, runs, "clone", searches, chosen),
        "fork": _choice(request, run_page.with_checkpoint(runs), "fork", searches, chosen),
    }


def _choice(
    request: HttpRequest,
    runs: QuerySet[Run],
    name: str,
    searches: Mapping[str, str],
    chosen: Mapping[str, str],
) -> dict[str, Any]:
    """Options of one list, and the result of its search."""
    find, error = searches[name], ""
    try:
        runs = matching(runs, parse(find), user=request.user)
    except BadQuery as bad:
        error, runs = str(bad), runs.none()
    columns = ("pk", "name", "committed_rounds", "owner__username", "created_at")
    rows = list(runs.order_by("-created_at", "-id").values_list(*columns)[: OFFERED + 1])
    options = [
        (str(pk), f"{run} · {done} rounds · {owner}, {at:%Y-%m-%d}")
        for pk, run, done, owner, at in rows[:OFFERED]
    ]
    # Search results come first, so that the first one is selected.
    if (pk := chosen.get(name, "")) and not find and pk not in dict(options):
        other = run_page.by_id(pk)
        options.insert(0, (pk, other.name if other else pk))
    return {
        "options": options,
        "find": find,
        "error": error,
        "more": len(rows) > OFFERED,
        "none": bool(find) and not options and not error,
    }
