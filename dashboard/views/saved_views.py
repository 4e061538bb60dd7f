"""Save the current list, or the panels of a run, as a view; rename, share, replace and delete it.

The form field ``back`` holds the query of the page, to which every form returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, QueryDict
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_POST

from dashboard.access import or_404
from dashboard.list_address import ListAddress
from dashboard.views.access import reader, run_to_see
from runs.actions import run_views, shared_rows
from runs.actions import saved_views as service
from runs.exceptions import ActionRefused, InvalidRun
from runs.models import Run, RunView, SavedView
from runs.queries.panel_layout import PanelLayout

LONGEST_ADDRESS = 8000


@require_POST
def save(request: HttpRequest) -> HttpResponse:
    user, address = reader(request), _here(request)
    try:
        view = service.save(
            user,
            name=request.POST.get("name", ""),
            shared=bool(request.POST.get("shared")),
            **_content(address),
        )
    except ActionRefused as error:
        messages.error(request, f"View not saved: {error}.")
    else:
        messages.success(request, f"View {view.name} saved.")
    return _back(address)


@require_POST
def view(request: HttpRequest, view_id: int) -> HttpResponse:
    """``do`` is ``change`` (name, shared), ``replace`` (with the current list) or ``delete``."""
    address = _here(request)
    saved = or_404(shared_rows.to_delete(SavedView, reader(request), view_id))

    def replace() -> None:
        service.replace(
            saved,
            **_content(address),
        )

    return _changed(request, saved, replace) or _back(address)


@require_POST
def save_run_view(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Save the panels of a run's page as a view, which applies to every run."""
    run, user = run_to_see(request, run_id), reader(request)
    try:
        view = run_views.save(
            user,
            PanelLayout.of(_query(request)),
            name=request.POST.get("name", ""),
            shared=bool(request.POST.get("shared")),
        )
    except (ActionRefused, InvalidRun) as error:
        messages.error(request, f"View not saved: {error}.")
    else:
        messages.success(request, f"View {view.name} saved.")
    return _back_to_run(request, run)


@require_POST
def run_view(request: HttpRequest, run_id: Any, view_id: int) -> HttpResponse:
    """As :func:`view`; ``replace`` stores the panels of the page."""
    run = run_to_see(request, run_id)
    saved = or_404(shared_rows.to_delete(RunView, reader(request), view_id))

    def replace() -> None:
        run_views.replace(saved, PanelLayout.of(_query(request)))

    return _changed(request, saved, replace) or _back_to_run(request, run)


def _changed(
    request: HttpRequest, saved: SavedView | RunView, replace: Callable[[], None]
) -> HttpResponse | None:
    """Change, replace or delete a view. Returns a response only for an invalid request."""
    user, what = reader(request), request.POST.get("do", "")
    if what == "delete":
        if not shared_rows.can_delete(user, saved):
            raise PermissionDenied("Only its owner or an administrator can delete a view.")
        shared_rows.delete(saved)
        messages.success(request, f"View {saved.name} deleted.")
        return None
    if what not in ("change", "replace"):
        return HttpResponseBadRequest("expected do to be change, replace or delete")
    if saved.owner_id != user.pk:
        raise PermissionDenied("Only its owner can change a view.")
    try:
        if what == "change":
            name, shared = request.POST.get("name", ""), bool(request.POST.get("shared"))
            shared_rows.change(saved, name=name, shared=shared)
        else:
            replace()
    except (ActionRefused, InvalidRun) as error:
        messages.error(request, f"View not changed: {error}.")
    else:
        messages.success(request, f"View {saved.name} changed.")
    return None


def _query(request: HttpRequest) -> QueryDict:
    return QueryDict(request.POST.get("back", "")[:LONGEST_ADDRESS].removeprefix("?"))


def _content(address: ListAddress) -> dict[str, Any]:
    """The values of a list that a view keeps."""
    names = ("query", "columns", "differing", "group")
    return {"sort": str(address.order), **{name: getattr(address, name) for name in names}}


def _here(request: HttpRequest) -> ListAddress:
    """The address of the list, parsed and serialized again: it cannot redirect elsewhere."""
    return ListAddress.of(_query(request))


def _back(address: ListAddress) -> HttpResponse:
    return _redirect(reverse("runs"), str(address).removeprefix("?"))


def _back_to_run(request: HttpRequest, run: Run) -> HttpResponse:
    return _redirect(reverse("run", args=[run.pk]), _query(request).urlencode(safe=",:!"))


def _redirect(path: str, query: str) -> HttpResponse:
    """Return to a page, without a query that is too long for an address by now: escaping makes text
    up to nine times as long."""
    return redirect(f"{path}?{query}" if 0 < len(query) <= LONGEST_ADDRESS else path)
