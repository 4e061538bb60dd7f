"""Save the current list as a view; rename, share, replace and delete views.

The form field ``back`` holds the address of the list, to which every form returns.
"""

from __future__ import annotations

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_POST

from dashboard.access import or_404
from dashboard.list_address import ListAddress
from dashboard.views.access import reader
from runs.actions import saved_views as service
from runs.exceptions import ActionRefused
from runs.models import SavedView


@require_POST
def save(request: HttpRequest) -> HttpResponse:
    user, address = reader(request), _here(request)
    try:
        view = service.save(
            user,
            name=request.POST.get("name", ""),
            shared=bool(request.POST.get("shared")),
            query=address.query,
            sort=str(address.order),
            columns=address.columns,
            differing=address.differing,
            group=address.group,
        )
    except ActionRefused as error:
        messages.error(request, f"View not saved: {error}.")
    else:
        messages.success(request, f"View {view.name} saved.")
    return _back(address)


@require_POST
def view(request: HttpRequest, view_id: int) -> HttpResponse:
    """``do`` is ``change`` (name, shared), ``replace`` (with the current list) or ``delete``."""
    user, address = reader(request), _here(request)
    saved_view = or_404(service.view_to_delete(user, view_id))
    what = request.POST.get("do", "")
    if what == "delete":
        if not service.can_delete(user, saved_view):
            raise PermissionDenied("Only its owner or an administrator can delete a view.")
        service.delete(saved_view)
        messages.success(request, f"View {saved_view.name} deleted.")
        return _back(address)
    if what not in ("change", "replace"):
        return HttpResponseBadRequest("expected do to be change, replace or delete")
    if saved_view.owner_id != user.pk:
        raise PermissionDenied("Only its owner can change a view.")
    try:
        if what == "change":
            _change(request, saved_view)
        else:
            _replace(saved_view, address)
    except ActionRefused as error:
        messages.error(request, f"View not changed: {error}.")
    else:
        messages.success(request, f"View {saved_view.name} changed.")
    return _back(address)


def _change(request: HttpRequest, saved_view: SavedView) -> None:
    service.change(
        saved_view, name=request.POST.get("name", ""), shared=bool(request.POST.get("shared"))
    )


def _replace(saved_view: SavedView, address: ListAddress) -> None:
    service.replace(
        saved_view,
        query=address.query,
        sort=str(address.order),
        columns=address.columns,
        differing=address.differing,
        group=address.group,
    )


def _here(request: HttpRequest) -> ListAddress:
    """The address of the list, parsed and serialized again: it cannot redirect elsewhere."""
    return ListAddress.of_text(request.POST.get("back", "")[:4000])


def _back(address: ListAddress) -> HttpResponse:
    return redirect(f"{reverse('runs')}{address if str(address) != '?' else ''}")
