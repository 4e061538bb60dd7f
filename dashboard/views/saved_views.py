"""Saving what the runs list shows, and what becomes of it: renamed, shared, replaced, deleted.

Every form says in ``back`` what the list shows, and leads back to it.
"""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBadRequest
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_POST

from dashboard.list_address import ListAddress
from runs import permissions
from runs.actions import saved_views as service
from runs.exceptions import CannotDo
from runs.models import SavedView


@require_POST
def save(request: HttpRequest) -> HttpResponse:
    user, here = _person(request), _here(request)
    try:
        view = service.save(
            user,
            name=request.POST.get("name", ""),
            shared=bool(request.POST.get("shared")),
            query=here.query,
            sort=str(here.order),
            columns=here.columns,
            differing=here.differing,
        )
    except CannotDo as error:
        messages.error(request, f"The view was not saved: {error}.")
    else:
        messages.success(request, f"Saved as {view.name}.")
    return _back(here)


@require_POST
def view(request: HttpRequest, view_id: int) -> HttpResponse:
    """``do`` is ``change`` (name, shared), ``replace`` (by what the list shows) or ``delete``."""
    user, here = _person(request), _here(request)
    found = service.view_to_delete(user, view_id)
    if found is None:
        raise Http404
    what = request.POST.get("do", "")
    if what == "delete":
        if not service.may_delete(user, found):
            raise PermissionDenied("A view is deleted by its owner or an administrator.")
        service.delete(found)
        messages.success(request, f"The view {found.name} is deleted.")
        return _back(here)
    if what not in ("change", "replace"):
        return HttpResponseBadRequest("expected do to be change, replace or delete")
    if found.owner_id != user.pk:
        raise PermissionDenied("A view is changed by its owner.")
    try:
        if what == "change":
            _change(request, found)
        else:
            _replace(found, here)
    except CannotDo as error:
        messages.error(request, f"The view was not changed: {error}.")
    else:
        messages.success(request, f"The view {found.name} is changed.")
    return _back(here)


def _change(request: HttpRequest, found: SavedView) -> None:
    service.change(
        found, name=request.POST.get("name", ""), shared=bool(request.POST.get("shared"))
    )


def _replace(found: SavedView, here: ListAddress) -> None:
    service.replace(
        found,
        query=here.query,
        sort=str(here.order),
        columns=here.columns,
        differing=here.differing,
    )


def _person(request: HttpRequest) -> User:
    assert isinstance(request.user, User)
    if not permissions.may_look(request.user):
        raise PermissionDenied("An administrator can give you a role.")
    return request.user


def _here(request: HttpRequest) -> ListAddress:
    """Parsed and written again, so that it leads to the list and nowhere else."""
    return ListAddress.of_text(request.POST.get("back", "")[:4000])


def _back(here: ListAddress) -> HttpResponse:
    return redirect(f"{reverse('runs')}{here if str(here) != '?' else ''}")
