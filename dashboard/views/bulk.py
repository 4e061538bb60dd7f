"""Actions on several runs of the list: compare, stop, archive, restore, tag, delete.

The runs are those that were picked, or with ``matching`` all that match the query of the list.
Each run is checked separately: runs that the user cannot change, or whose state does not allow the
action, are skipped and reported. Stop, and any change of all runs that match, asks for confirmation
on a page that lists the runs, and then acts on these alone: a query can match others by then.
Delete also asks for the number of runs.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

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
from runs.actions import lifecycle, replicas_and_pools
from runs.exceptions import ActionRefused
from runs.models import Run
from runs.queries import comparison, search, selectors

MOST = 500
"""Runs that one request changes."""
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
NOT_YOURS = "operators can change only their own runs"


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
    own = _operable(user, selected)
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
    kept = [(run, NOT_YOURS) for run in selected if run not in own]
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
    gone = 0
    for run in runs:
        try:
            lifecycle.delete(run, actor=user, name=run.name, objects=objects)
            gone += 1
        except ActionRefused as error:
            kept.append((run, str(error)))
        except Run.DoesNotExist:  # a concurrent deletion has finished
            gone += 1
    if not kept:
        messages.success(request, f"Deleting {gone} run{'s' if gone != 1 else ''}.")
        return _back(request)
    return render(request, "runs/bulk_delete.html", context | {"gone": gone, "done": True})


def _act_on_all(request: HttpRequest, what: str, runs: list[Run], others: int) -> None:
    """Apply the action to each run, and report the outcome in one message."""
    changed, refused = 0, []
    for run in runs:
        try:
            changed += _act(request, what, run)
        except ActionRefused as error:
            refused.append(f"{run.name}: {error}")
        except Run.DoesNotExist:
            refused.append(f"{run.name}: it was deleted")
    unchanged = len(runs) - changed - len(refused)
    parts = [f"{changed} {DONE[what]}"] if changed or not (refused or others) else []
    if unchanged and changed:
        parts.append(f"{unchanged} already done")
    if others:
        parts.append(f"{others} skipped: {NOT_YOURS}")
    parts += refused[:3] + ([f"and {len(refused) - 3} more"] if len(refused) > 3 else [])
    level = messages.WARNING if refused or others else messages.SUCCESS
    messages.add_message(request, level, "; ".join(parts) + ".")


def _act(request: HttpRequest, what: str, run: Run) -> bool:
    user = signed_in(request)
    acts: dict[str, Callable[[], Any]] = {
        "stop": lambda: replicas_and_pools.request_stop(run, actor=user),
        "archive": lambda: lifecycle.archive(run, actor=user),
        "restore": lambda: lifecycle.archive(run, actor=user, archived=False),
        "tag": lambda: lifecycle.describe(
            run, more_tags=request.POST.get("tag", "").split(), actor=user
        ),
    }
    return bool(acts[what]())


def _selected(request: HttpRequest) -> list[Run]:
    """The picked runs, or all that match the query of the list.

    Raises ``ValueError`` if the query is invalid, or if there are too many runs.
    """
    visible = selectors.runs_for(request.user)
    if "matching" in request.POST:
        back = request.POST.get("back", "")
        if len(back) > MOST_ADDRESS:  # a part of a query matches other runs
            raise ValueError(f"expected a query of at most {MOST_ADDRESS} characters")
        terms = search.parse(ListAddress.of_text(back).query)
        runs = search.matching(visible, terms, user=request.user)
    else:
        wanted = {uuid.UUID(i) for i in request.POST.getlist("id") if _is_id(i)}
        if not wanted:
            return []
        runs = visible.filter(pk__in=wanted)
    selected = list(runs.order_by("-created_at", "-pk")[: MOST + 1])
    if len(selected) > MOST:
        raise ValueError(f"expected at most {MOST} runs, found {runs.count()}. Narrow the query")
    return selected


def _operable(user: User, runs: list[Run]) -> list[Run]:
    """The runs that the user can operate, with one query for the role."""
    if permissions.has_role(user, "admin"):
        return runs
    return [run for run in runs if run.owner_id == user.pk]


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
