"""Saved views of the runs list: save and replace.

Their names, owners and sharing are those of :mod:`runs.actions.shared_rows`. Views have no events
and no journal, because they do not belong to a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.db.models import QuerySet

from archipelago import rows
from runs.actions import shared_rows
from runs.exceptions import ActionRefused
from runs.json_values import row_of
from runs.models import SavedView
from runs.queries import groups, table
from runs.queries.listing import Order
from runs.queries.search import BadQuery, parse


def views_for(user: AbstractBaseUser | AnonymousUser) -> QuerySet[SavedView]:
    """A user's own views and the shared ones, by name."""
    return shared_rows.visible(SavedView.objects.all(), user)


def view_to_delete(user: User, view_id: int) -> SavedView | None:
    """The view if ``user`` can see it; an administrator also sees private views of others."""
    return shared_rows.to_delete(SavedView.objects.all(), user).filter(pk=view_id).first()


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
    view: SavedView | None = None,
) -> SavedView:
    """Save a new view, or replace ``view``. Raises :class:`ActionRefused` for invalid values."""
    if view is None:
        shared_rows.check_number(SavedView, owner)
        view = SavedView(owner=owner)
    shared_rows.set_name(view, name)
    shared_rows.set_shared(view, shared)
    _show(view, query=query, sort=sort, columns=columns, differing=differing, group=group)
    return shared_rows.store(view)


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
    return shared_rows.store(view)


def row(view: SavedView, *, user: User) -> dict[str, Any]:
    """The view as the API returns it."""
    owner = view.owner.get_username()
    return row_of(rows.View, view, owner=owner, mine=view.owner_id == user.pk)


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
