"""The menu of saved views, on the runs list and on the run page (``partials/views.html``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import F, QuerySet
from django.http import HttpRequest
from django.urls import reverse

from dashboard.list_address import ListAddress
from runs import permissions
from runs.actions import shared_rows
from runs.actions.shared_rows import S
from runs.models import Run, RunView, SavedView
from runs.queries.panel_layout import PanelLayout


def list_view_menu(request: HttpRequest, address: ListAddress) -> dict[str, Any]:
    """Context of the menu on the runs list; the view that is displayed is marked."""
    views = _with_owners(shared_rows.visible(SavedView, request.user))
    rows = []
    for view, can_delete in _deletable(request.user, views):
        view_address = ListAddress.of_view(view)
        row = _row(request.user, view, can_delete)
        row |= {"href": f"{reverse('runs')}{view_address}", "shown": view_address == address}
        rows.append(row | {"action": reverse("view", args=[view.pk])})
    return {"views": rows, "save_view": reverse("view-save")}


def run_view_menu(request: HttpRequest, run: Run) -> dict[str, Any]:
    """Context of the menu on the run page; its script marks the view that is displayed."""
    views = _with_owners(shared_rows.visible(RunView, request.user))
    rows = [
        _row(request.user, view, can_delete)
        | {
            "href": str(PanelLayout.of_view(view)),
            "action": reverse("run-view", args=[run.pk, view.pk]),
        }
        for view, can_delete in _deletable(request.user, views)
    ]
    return {"views": rows, "save_view": reverse("run-view-save", args=[run.pk])}


def _with_owners(views: QuerySet[S]) -> list[S]:
    """Views with the name of their owner, ``owner_name``, in place of all about the owner."""
    return list(views.select_related(None).annotate(owner_name=F("owner__username")))


def _deletable(
    user: AbstractBaseUser | AnonymousUser, views: Sequence[Any]
) -> list[tuple[Any, bool]]:
    """Views, and whether the user can delete each."""
    others = any(view.owner_id != user.pk for view in views)
    is_admin = others and permissions.has_role(user, "admin")
    return [(view, view.owner_id == user.pk or is_admin) for view in views]


def _row(user: AbstractBaseUser | AnonymousUser, view: Any, can_delete: bool) -> dict[str, Any]:
    is_own = view.owner_id == user.pk
    return {"view": view, "owner": view.owner_name, "mine": is_own, "can_delete": can_delete}
