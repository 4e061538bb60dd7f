"""What is done to several runs of the list at once: compare, stop, archive, take in again, tag,
delete.

Each run is looked at by itself: what somebody may not touch, or what cannot be done to it, is left
as it is and said. Stopping is asked once more, on a page that names what will be stopped; deleting
as well, and there the number of runs is typed.
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

from runs import permissions
from runs.actions import lifecycle, replicas_and_pools
from runs.exceptions import CannotDo
from runs.json_values import texts
from runs.models import Run
from runs.queries import selectors

MOST = 200
DONE = {"stop": "stopping", "archive": "archived", "restore": "in the list again", "tag": "tagged"}
NOT_YOURS = "it is not yours: operators act on their own runs"


@require_POST
def bulk(request: HttpRequest) -> HttpResponse:
    what = request.POST.get("do", "")
    ids = list(dict.fromkeys(request.POST.getlist("id")))
    if what == "compare":
        return redirect(f"{reverse('compare')}?ids={','.join(i for i in ids if _is_id(i))}")
    if what not in (*DONE, "delete"):
        known = ", ".join((*DONE, "delete"))
        return HttpResponseBadRequest(f"expected do to be compare or one of {known}")
    if not permissions.may_submit(request.user):
        raise PermissionDenied("Viewers watch runs; an administrator can make you an operator.")
    assert isinstance(request.user, User)
    found = _found(request, ids)
    if not found:
        messages.info(request, "No run was selected.")
        return _back(request)
    mine = _mine(request.user, found)
    if what == "delete":
        return _delete(request, request.user, found, mine)
    others = len(found) - len(mine)
    if what == "stop" and "confirmed" not in request.POST:
        context = {
            "runs": [run for run in mine if not run.ended],
            "ended": sum(run.ended for run in mine),
            "others": others,
            "back": _query(request),
        }
        return render(request, "runs/bulk_stop.html", context)
    _say(request, what, mine, others)
    return _back(request)


def _delete(request: HttpRequest, user: User, found: list[Run], mine: list[Run]) -> HttpResponse:
    """The page that asks; once the number is typed, what became of each that could not be."""
    kept = [(run, NOT_YOURS) for run in found if run not in mine]
    why = lifecycle.why_not_deleted(mine)
    kept += [(run, why[run.pk]) for run in mine if run.pk in why]
    runs = [run for run in mine if run.pk not in why]
    typed, objects = request.POST.get("count", "").strip(), bool(request.POST.get("objects"))
    context = {
        "runs": runs,
        "kept": kept,
        "objects": objects,
        "typed": typed,
        "back": _query(request),
    }
    if "confirmed" not in request.POST:
        return render(request, "runs/bulk_delete.html", context)
    if typed != str(len(runs)):
        context["error"] = f"expected {len(runs)}, found {typed or 'nothing'}"
        return render(request, "runs/bulk_delete.html", context, status=422)
    gone = 0
    for run in runs:
        try:
            lifecycle.delete(run, actor=user, name=run.name, objects=objects)
            gone += 1
        except CannotDo as error:
            kept.append((run, str(error)))
        except Run.DoesNotExist:  # somebody else's deletion was quicker
            gone += 1
    if not kept:
        messages.success(request, f"{gone} being deleted.")
        return _back(request)
    return render(request, "runs/bulk_delete.html", context | {"gone": gone, "done": True})


def _say(request: HttpRequest, what: str, mine: list[Run], others: int) -> None:
    changed, refused = 0, []
    for run in mine:
        try:
            changed += _act(request, what, run)
        except CannotDo as error:
            refused.append(f"{run.name}: {error}")
    unchanged = len(mine) - changed - len(refused)
    parts = [f"{changed} {DONE[what]}"] if changed or not (refused or others) else []
    if unchanged and changed:
        parts.append(f"{unchanged} were so already")
    if others:
        parts.append(f"{others} not touched: operators act on their own runs")
    parts += refused[:3] + ([f"and {len(refused) - 3} more"] if len(refused) > 3 else [])
    level = messages.WARNING if refused or others else messages.SUCCESS
    messages.add_message(request, level, "; ".join(parts) + ".")


def _act(request: HttpRequest, what: str, run: Run) -> bool:
    assert isinstance(request.user, User)
    user = request.user
    acts: dict[str, Callable[[], Any]] = {
        "stop": lambda: replicas_and_pools.request_stop(run, actor=user),
        "archive": lambda: lifecycle.archive(run, actor=user),
        "restore": lambda: lifecycle.archive(run, actor=user, archived=False),
        "tag": lambda: lifecycle.describe(
            run,
            notes=run.notes,
            tags=[*texts(run.tags), *request.POST.get("tag", "").split()],
            actor=user,
        ),
    }
    return bool(acts[what]())


def _found(request: HttpRequest, ids: list[str]) -> list[Run]:
    wanted = [uuid.UUID(i) for i in ids if _is_id(i)][:MOST]
    if not wanted:
        return []
    return list(selectors.runs_for(request.user).filter(pk__in=wanted))


def _mine(user: User, found: list[Run]) -> list[Run]:
    """Those the user may operate, asking for the role once."""
    if permissions.has_role(user, "admin"):
        return found
    return [run for run in found if run.owner_id == user.pk]


def _back(request: HttpRequest) -> HttpResponse:
    query = _query(request)
    return redirect(reverse("runs") + (f"?{query}" if query else ""))


def _query(request: HttpRequest) -> str:
    """Of the list's address: it is put behind our own path, so it leads nowhere else."""
    return request.POST.get("back", "").removeprefix("?")[:2000]


def _is_id(text: str) -> bool:
    try:
        return bool(uuid.UUID(text))
    except ValueError:
        return False
