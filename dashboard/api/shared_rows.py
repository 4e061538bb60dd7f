"""Permissions of saved views and boards, which :mod:`runs.actions.shared_rows` stores."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.http import HttpRequest
from ninja.errors import AuthorizationError

from dashboard.access import or_404
from dashboard.api.auth import keeper
from runs.actions import shared_rows
from runs.actions.shared_rows import S


def own(model: type[S], user: User, pk: int) -> S:
    """The row that ``user`` is about to change."""
    row = or_404(shared_rows.visible(model, user).filter(pk=pk).first())
    if row.owner_id != user.pk:
        raise AuthorizationError(message=f"expected its owner {row.owner}, found {user}")
    return row


def check_shared(user: User, asked: bool) -> None:
    if asked and not shared_rows.can_share(user):
        raise AuthorizationError(message=f"expected an operator, found {user}, a viewer")


def delete(request: HttpRequest, model: type[S], pk: int) -> None:
    """Delete an own row, or as administrator any."""
    user = keeper(request)
    row = or_404(shared_rows.to_delete(model, user, pk))
    if not shared_rows.can_delete(user, row):
        raise AuthorizationError(
            message=f"expected its owner {row.owner}, or an administrator, found {user}"
        )
    shared_rows.delete(row)
