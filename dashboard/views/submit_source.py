"""What the submit form is filled in with: a template, a clone of a run, a fork from its round.

The form's *Source* is a form of its own that only asks for this page again: its answer is sent on
to the address that says the same (``?template=``, ``?clone=<run>``, ``?fork=<run>&round=<r>``),
which is also what other pages lead to.

Of thousands of runs the newest are offered, and *Find* asks for others with the runs list's query
(:mod:`runs.queries.search`). Its button sends the whole form, so nothing that was typed is lost; an
address may ask as well (``?find_clone=``, ``?find_fork=``).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.db.models import Exists, OuterRef, QuerySet
from django.http import Http404, HttpRequest

from dashboard.views.access import run_to_see
from runs.models import Checkpoint, Run
from runs.queries import selectors
from runs.queries.search import BadQuery, matching, parse
from runs.submit import clone_and_fork
from runs.submit.run_draft import TEMPLATES, RunDraft

KINDS = ("template", "clone", "fork")
OFFERED = 50
"""Newest runs to choose from; others are searched for."""
SEARCHED = ("clone", "fork")
ENTER = "enter"
"""Value of the button that Enter presses, in whatever field."""


def searched(sent: Mapping[str, str]) -> str:
    """Which list the form was sent to be searched; '' for none. Enter in *Find* presses the form's
    first button, so what was typed there since the last answer is looked for."""
    if sent.get("search") in SEARCHED:
        return sent["search"]
    if sent.get("dry_run") != ENTER:
        return ""
    changed = (
        kind for kind in SEARCHED if sent.get(f"find_{kind}", "") != sent.get(f"found_{kind}", "")
    )
    return next(changed, "")


def address(query: Mapping[str, str]) -> str | None:
    """The query that says what *Source* was sent with; None for an address that says it already."""
    if "source" not in query:
        return None
    kind = query["source"]
    chosen = {kind: query.get(kind, "")} if kind in KINDS else {}
    if kind == "fork" and query.get("round"):
        chosen["round"] = query["round"]
    return urlencode({name: value for name, value in chosen.items() if value})


def kind_of(query: Mapping[str, str]) -> str:
    return next((kind for kind in ("fork", "clone") if kind in query), "template")


def draft_of(request: HttpRequest) -> RunDraft | None:
    """What the address names; None for none, which is the first template with what else it says."""
    query, kind = request.GET, kind_of(request.GET.dict())
    if kind == "template":
        found = TEMPLATES.get(query.get("template", ""))
        return found.make() if found else None
    try:
        pk = uuid.UUID(query[kind])
    except ValueError:
        raise Http404 from None
    run = run_to_see(request, pk)
    if kind == "clone":
        return clone_and_fork.clone_of(run)
    rounds = clone_and_fork.forkable(run)
    if not rounds:
        messages.error(request, f"{run.name} has no checkpoint to begin with: this is a clone.")
        return clone_and_fork.clone_of(run)
    wanted = query.get("round", "")
    known = {str(number): number for number in rounds}
    chosen = known.get(wanted, rounds[0])
    if wanted and str(chosen) != wanted:
        messages.warning(request, f"The checkpoint of round {wanted[:20]} is not kept.")
    return clone_and_fork.fork_of(run, chosen)


def offered(request: HttpRequest) -> dict[str, Any]:
    """For the page: what there is to choose from, and what was chosen. Two queries."""
    query = request.GET.dict()
    kind = kind_of(query)
    # Only what draft_of has looked at: somebody may see it, and it is an id.
    chosen = {kind: query.get(kind, "")}
    sent = query | request.POST.dict()
    asked = {name: sent.get(f"find_{name}", "").strip() for name in SEARCHED}
    runs = selectors.runs_for(request.user)
    saved = Checkpoint.objects.filter(run=OuterRef("pk"), final=False)
    shown = searched(sent) or next((name for name in SEARCHED if asked[name]), kind)
    return {
        "kind": shown if "search" in sent or any(asked.values()) else kind,
        "chosen": chosen[kind],
        "round": query.get("round", ""),
        "templates": [(name, template.label) for name, template in TEMPLATES.items()],
        "clone": _choice(request, runs, "clone", asked, chosen),
        "fork": _choice(request, runs.filter(Exists(saved)), "fork", asked, chosen),
    }


def _choice(
    request: HttpRequest,
    runs: QuerySet[Run],
    name: str,
    asked: Mapping[str, str],
    chosen: Mapping[str, str],
) -> dict[str, Any]:
    """Options of one list, and what is to be said of its search."""
    find, error = asked[name], ""
    try:
        runs = matching(runs, parse(find), user=request.user)
    except BadQuery as wrong:
        error, runs = str(wrong), runs.none()
    columns = ("pk", "name", "committed_rounds", "owner__username", "created_at")
    found = list(runs.order_by("-created_at", "-id").values_list(*columns)[: OFFERED + 1])
    options = [
        (str(pk), f"{run} · {done} rounds · {owner}, {at:%Y-%m-%d}")
        for pk, run, done, owner, at in found[:OFFERED]
    ]
    # What was searched for stands first, so that it is chosen.
    if (pk := chosen.get(name, "")) and not find and pk not in dict(options):
        other = Run.objects.filter(pk=pk).values_list("name", flat=True).first()
        options.insert(0, (pk, other or pk))
    return {
        "options": options,
        "find": find,
        "error": error,
        "more": len(found) > OFFERED,
        "none": bool(find) and not options and not error,
    }
