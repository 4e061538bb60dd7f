"""Saved views of the run page: save and replace.

Their names, owners and sharing are those of :mod:`runs.actions.shared_rows`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.contrib.auth.models import User

from archipelago import rows
from runs.actions import shared_rows
from runs.json_values import row_of
from runs.models import RunView
from runs.queries.panel_layout import PanelLayout


def save(
    owner: User,
    layout: PanelLayout,
    *,
    name: str,
    shared: bool = False,
    view: RunView | None = None,
) -> RunView:
    """Save a new view, or replace ``view``. Raises :class:`~runs.exceptions.ActionRefused`."""
    return replace(shared_rows.named(RunView, owner, view, name=name, shared=shared), layout)


def replace(view: RunView, layout: PanelLayout) -> RunView:
    """Replace the content of a view."""
    for name, value in asdict(layout).items():
        setattr(view, name, value)
    return shared_rows.store(view)


def row(view: RunView, *, user: User) -> dict[str, Any]:
    """The view as the API returns it."""
    layout = asdict(PanelLayout.of_view(view))
    owner = view.owner.get_username()
    return row_of(rows.RunView, view, owner=owner, mine=view.owner_id == user.pk, **layout)
