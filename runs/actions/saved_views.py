"""Saved views of the runs list: save, change, delete.

Every user with a role can save views. Operators and administrators can share a view with all users;
only its owner can change it, and an administrator can delete any. A user's view names are unique,
ignoring case. Views have no events and no journal, because they do not belong to a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from archipelago import rows
from runs import permissions
from runs.exceptions import ActionRefused
from runs.json_values import row_of
from runs.models import SavedView
from runs.queries import groups, table
from runs.queries.listing import Order
from runs.queries.search import BadQuery, parse

NAME_LENGTH = 80
PER_PERSON = 100


def views_for(user: AbstractBaseUser | AnonymousUser) -> QuerySet[SavedView]:
    """A user's own views and the shared ones, by name."""
    if not isinstance(user, User) or not permissions.can_view(user):
        return SavedView.objects.none()
    views = SavedView.objects.select_related("owner")
    return views.filter(Q(owner=user) | Q(shared=True)).order_by("name", "pk")


def view_to_delete(user: User, view_id: int) -> SavedView | None:
    """The view if ``user`` can see it; an administrator also sees private views of others.
    :func:`can_delete` decides whether it can be deleted."""
    every = SavedView.objects.select_related("owner")
    views = every if permissions.has_role(user, "admin") else views_for(user)
    return views.filter(pk=view_id).first()


def can_share(user: AbstractBaseUser | AnonymousUser) -> bool:
    return permissions.can_submit(user)


def can_delete(user: User, view: SavedView) -> bool:
    return view.owner_id == user.pk or permissions.has_role(user, "admin")


def save(
    owner: User,
    *,
    name: str,
    query: str = "",
    sort: str = "",
    columns: Iterable[str] = (),
    differing: bool = False,
    group: str = "",
    shared: bool = False,
) -> SavedView:
    """Save a new view. Raises :class:`ActionRefused` for invalid values."""
    if SavedView.objects.filter(owner=owner).count() >= PER_PERSON:
        raise ActionRefused(f"expected at most {PER_PERSON} views, found that many: delete some")
    view = SavedView(owner=owner)
    _name(view, name)
    _share(view, shared)
    _show(view, query=query, sort=sort, columns=columns, differing=differing, group=group)
    return _store(view)


def change(view: SavedView, *, name: str | None = None, shared: bool | None = None) -> SavedView:
    """Rename a view, share it, or stop sharing it."""
    if name is not None:
        _name(view, name)
    if shared is not None:
        _share(view, shared)
    return _store(view)


def replace(
    view: SavedView,
    *,
    query: str,
    sort: str,
    columns: Iterable[str],
    differing: bool,
    group: str = "",
) -> SavedView:
    """Replace the content of a view."""
    _show(view, query=query, sort=sort, columns=columns, differing=differing, group=group)
    return _store(view)


def delete(view: SavedView) -> None:
    SavedView.objects.filter(pk=view.pk).delete()


def row(view: SavedView, *, user: User) -> dict[str, Any]:
    """The view as the API returns it."""
    owner = view.owner.get_username()
    return row_of(rows.View, view, owner=owner, mine=view.owner_id == user.pk)


def _name(view: SavedView, name: str) -> None:
    name = " ".join(name.split())
    if not 1 <= len(name) <= NAME_LENGTH or not name.isprintable():
        raise ActionRefused(
            f"expected a name of 1 to {NAME_LENGTH} characters, found {name[:NAME_LENGTH]!r}"
        )
    others = SavedView.objects.filter(owner=view.owner, name__iexact=name).exclude(pk=view.pk)
    if others.exists():
        raise ActionRefused(f"expected a name that none of your views has, found {name!r}")
    view.name = name


def _share(view: SavedView, shared: bool) -> None:
    if shared and not view.shared and not can_share(view.owner):
        raise ActionRefused("only operators and administrators can share a view")
    view.shared = shared


def _show(
    view: SavedView, *, query: str, sort: str, columns: Iterable[str], differing: bool, group: str
) -> None:
    query = query.strip()
    try:
        parse(query)
    except BadQuery as error:
        raise ActionRefused(f"query: {error}") from error
    picked = table.chosen(columns)
    view.query, view.sort = query, str(Order.of(sort))
    view.columns = [] if picked == table.DEFAULT else list(picked)
    view.differing = differing
    view.group = group if group in groups.BY else ""


def _store(view: SavedView) -> SavedView:
    view.changed_at = timezone.now()
    try:
        with transaction.atomic():
            view.save()
    except IntegrityError:  # two concurrent requests
        raise ActionRefused(
            f"expected a name that none of your views has, found {view.name!r}"
        ) from None
    return view
