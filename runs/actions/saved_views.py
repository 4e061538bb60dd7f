"""Saved views of the runs list: save and replace.

Their names, owners and sharing are those of :mod:`runs.actions.shared_rows`. Views have no events
and no journal, because they do not belong to a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib.auth.models import User

from archipelago import rows
from runs.actions import shared_rows
from runs.exceptions import ActionRefused
from runs.json_values import row_of
from runs.models import SavedView
from runs.queries import groups, table
from runs.queries.listing import Order
from runs.queries.search import BadQuery, parse


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
    view = shared_rows.named(SavedView, owner, view, name=name, shared=shared)
    return replace(view, query=query, sort=sort, columns=columns, differing=differing, group=group)


def replace(
    view: SavedView, *, query: str, sort: str, columns: Iterable[str], differing: bool, group: str
) -> SavedView:
    """Replace the content of a view."""
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
    return shared_rows.store(view)


def row(view: SavedView, *, user: User) -> dict[str, Any]:
    """The view as the API returns it."""
    owner = view.owner.get_username()
    return row_of(rows.View, view, owner=owner, mine=view.owner_id == user.pk)
