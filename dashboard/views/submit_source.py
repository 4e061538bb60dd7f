"""What the submit form is filled in with: a template, a clone of a run, a fork from its round.

The form's *Source* is a form of its own that only asks for this page again: its answer is sent on
to the address that says the same (``?template=``, ``?clone=<run>``, ``?fork=<run>&round=<r>``),
which is also what other pages lead to.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.db.models import Exists, OuterRef
from django.http import Http404, HttpRequest

from dashboard.views.access import run_to_see
from runs import selectors
from runs.drafts import copies
from runs.drafts.presets import TEMPLATES, RunDraft
from runs.models import Checkpoint, Run

KINDS = ("template", "clone", "fork")
OFFERED = 50
"""Newest runs to choose from; of an older one its own page leads here."""


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
        return copies.clone_of(run)
    rounds = copies.forkable(run)
    if not rounds:
        messages.error(request, f"{run.name} has no checkpoint to begin with: this is a clone.")
        return copies.clone_of(run)
    wanted = query.get("round", "")
    known = {str(number): number for number in rounds}
    chosen = known.get(wanted, rounds[0])
    if wanted and str(chosen) != wanted:
        messages.warning(request, f"The checkpoint of round {wanted[:20]} is not kept.")
    return copies.fork_of(run, chosen)


def offered(request: HttpRequest) -> dict[str, Any]:
    """For the page: what there is to choose from, and what was chosen. Two queries."""
    query = request.GET.dict()
    kind = kind_of(query)
    # Only what draft_of has looked at: somebody may see it, and it is an id.
    chosen = {kind: query.get(kind, "")}
    runs = selectors.runs_for(request.user).filter(archived_at=None)
    saved = Checkpoint.objects.filter(run=OuterRef("pk"), final=False)
    return {
        "kind": kind,
        "chosen": chosen[kind],
        "round": query.get("round", ""),
        "templates": [(name, template.label) for name, template in TEMPLATES.items()],
        "clone": _options(runs, chosen=chosen.get("clone", "")),
        "fork": _options(runs.filter(Exists(saved)), chosen=chosen.get("fork", "")),
    }


def _options(runs: Any, *, chosen: str) -> list[tuple[str, str]]:
    found = runs.order_by("-created_at", "-id").values_list("pk", "name", "committed_rounds")
    options = [(str(pk), f"{name} · {done} rounds") for pk, name, done in found[:OFFERED]]
    if chosen and chosen not in dict(options):
        other = Run.objects.filter(pk=chosen).values_list("name", flat=True).first()
        options.insert(0, (chosen, other or chosen))
    return options
