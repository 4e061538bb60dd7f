"""Actions on several runs of the list: compare, stop, archive, restore, tag, delete.

The runs are those that were picked, or with ``matching`` all that match the query of the list.
Each run is checked separately: runs that the user cannot change, or whose state does not allow the
action, are skipped and reported. Stop, and any change of all runs that match, asks for confirmation
on a page that lists the runs, and then acts on these alone: a query can match others by then.
Delete also asks for the number of runs.
"""

from __future__ import annotations

import uuid
from typing import cast

from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST

from dashboard.list_address import ListAddress
from dashboard.views.access import signed_in
from runs import permissions
from runs.actions import bulk as bulk_actions
from runs.actions import lifecycle
from runs.models import Run
from runs.queries import comparison

DONE = {"stop": "stopping", "archive": "archived", "restore": "restored", "tag": "tagged"}
ASKED = {
    "stop": (
        "Stop",
        "Each run ends at its newest committed round and keeps its weights. Later steps are lost.",
        "Keep them running",
    ),
    "archive": (
        "Archive",
        "Archived runs are hidden from the list. Their curves and weights are kept.",
        "Cancel",
    ),
    "restore": ("Unarchive", "The runs are listed again.", "Cancel"),
    "tag": ("Tag", "The runs keep their other tags.", "Cancel"),
}
"""Action -> verb, consequence, and the text of the link back of its confirmation."""
MOST_ADDRESS = 2000
MOST_TAG = 200


@require_POST
def bulk(request: HttpRequest) -> HttpResponse:
    what = request.POST.get("do", "")
    if what == "compare" and "matching" not in request.POST:
        return _compare(request, list(filter(_is_id, dict.fromkeys(request.POST.getlist("id")))))
    if what not in (*DONE, "compare", "delete"):
        known = ", ".join((*DONE, "delete"))
        return HttpResponseBadRequest(f"expected do to be one of compare, {known}")
    if what != "compare" and not permissions.can_submit(request.user):
        raise PermissionDenied("Viewers can't change runs. Ask an administrator for the role.")
    user = signed_in(request)
    try:
        selected = _selected(request)
    except ValueError as error:
        messages.error(request, f"Nothing was changed: {error}")
        return _back(request)
    if what == "compare":
        return _compare(request, [str(run.pk) for run in selected])
    if not selected:
        messages.info(request, "No runs selected.")
        return _back(request)
    own = bulk_actions.operable(user, selected)
    if what == "delete":
        return _delete(request, user, selected, own)
    others = len(selected) - len(own)
    if not _is_confirmed(request) and (what == "stop" or "matching" in request.POST):
        ended = sum(run.ended for run in own) if what == "stop" else 0
        verb, consequence, cancel = ASKED[what]
        context = {
            "do": what,
            "verb": verb,
            "consequence": consequence,
            "cancel": cancel,
            "tag": request.POST.get("tag", "").strip()[:MOST_TAG],
            "runs": [run for run in own if not (ended and run.ended)],
            "ended": ended,
            "others": others,
            "back": _query(request),
        }
        return render(request, "runs/bulk_confirm.html", context)
    _act_on_all(request, what, own, others)
    return _back(request)


def _compare(request: HttpRequest, ids: list[str]) -> HttpResponse:
    """Redirect to the comparison; the ids of more runs would make its address too long."""
    if len(ids) > comparison.MOST:
        messages.warning(request, f"Compared are the first {comparison.MOST} of {len(ids)} runs.")
    return redirect(f"{reverse('compare')}?ids={','.join(ids[: comparison.MOST])}")


def _is_confirmed(request: HttpRequest) -> bool:
    """Whether the request comes from a confirmation page, which names each run."""
    return "confirmed" in request.POST and "matching" not in request.POST


def _delete(request: HttpRequest, user: User, selected: list[Run], own: list[Run]) -> HttpResponse:
    """Show the confirmation page; with the right number, delete and list runs that are kept."""
    kept = [(run, bulk_actions.NOT_YOURS) for run in selected if run not in own]
    why = lifecycle.why_not_deleted(own)
    kept += [(run, why[run.pk]) for run in own if run.pk in why]
    runs = [run for run in own if run.pk not in why]
    typed, objects = request.POST.get("count", "").strip(), bool(request.POST.get("objects"))
    context = {
        "runs": runs,
        "kept": kept,
        "objects": objects,
        "typed": typed,
        "back": _query(request),
    }
    if not _is_confirmed(request):
        return render(request, "runs/bulk_delete.html", context)
    if typed != str(len(runs)):
        context["error"] = f"Enter {len(runs)}, the number of runs to delete."
        return render(request, "runs/bulk_delete.html", context, status=422)
    action = bulk_actions.BulkAction(verb="delete", objects=objects)
    outcomes = bulk_actions.act_on_all(runs, action, actor=user)
    gone = sum(one.changed for one in outcomes)
    kept += [(one.run, one.refusal) for one in outcomes if one.refusal]
    if not kept:
        messages.success(request, f"Deleting {gone} run{'s' if gone != 1 else ''}.")
        return _back(request)
    return render(request, "runs/bulk_delete.html", context | {"gone": gone, "done": True})


def _act_on_all(request: HttpRequest, what: str, runs: list[Run], others: int) -> None:
    """Apply the action to each run, and report the outcome in one message."""
    action = bulk_actions.BulkAction(
        verb=cast(bulk_actions.Verb, what), tags=request.POST.get("tag", "").split()
    )
    outcomes = bulk_actions.act_on_all(runs, action, actor=signed_in(request))
    changed = sum(one.changed for one in outcomes)
    refused = [f"{one.run.name}: {one.refusal}" for one in outcomes if one.refusal]
    unchanged = len(runs) - changed - len(refused)
    parts = [f"{changed} {DONE[what]}"] if changed or not (refused or others) else []
    if unchanged and changed:
        parts.append(f"{unchanged} already done")
    if others:
        parts.append(f"{others} skipped: {bulk_actions.NOT_YOURS}")
    parts += refused[:3] + ([f"and {len(refused) - 3} more"] if len(refused) > 3 else [])
    level = messages.WARNING if refused or others else messages.SUCCESS
    messages.add_message(request, level, "; ".join(parts) + ".")


def _selected(request: HttpRequest) -> list[Run]:
    """The picked runs, or all that match the query of the list.

    Raises ``ValueError`` if the query is invalid, or if there are too many runs.
    """
    if "matching" not in request.POST:
        ids = {uuid.UUID(i) for i in request.POST.getlist("id") if _is_id(i)}
        return bulk_actions.choose(request.user, ids=ids)
    back = request.POST.get("back", "")
    if len(back) > MOST_ADDRESS:  # a part of a query matches other runs
        raise ValueError(f"expected a query of at most {MOST_ADDRESS} characters")
    return bulk_actions.choose(request.user, query=ListAddress.of_text(back).query)


def _back(request: HttpRequest) -> HttpResponse:
    query = _query(request)
    return redirect(reverse("runs") + (f"?{query}" if query else ""))


def _query(request: HttpRequest) -> str:
    """Query string of the list. It is appended to our own path, so it cannot redirect elsewhere."""
    return request.POST.get("back", "").removeprefix("?")[:MOST_ADDRESS]


def _is_id(text: str) -> bool:
    try:
        return bool(uuid.UUID(text))
    except ValueError:
        return False
