"""What saved views and boards have in common: an owner, a unique name, and whether they are shared.

Every user with a role can save one. Operators and administrators can share it with all users; only
its owner can change it, and an administrator can delete any. The names of a user are unique,
ignoring case.
"""

from __future__ import annotations

from typing import Any, TypeVar

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.db.models import Q, QuerySet
from django.utils import timezone

from runs import permissions
from runs.actions.saving import AlreadyUsed, DeletedMeanwhile, save
from runs.exceptions import ActionRefused
from runs.models import Board, RunView, SavedView

NAME_LENGTH = 80
PER_PERSON = 100

Shared = SavedView | RunView | Board
S = TypeVar("S", bound=Shared)
KINDS: dict[type[Any], tuple[str, str]] = {
    SavedView: ("view", "views"),
    RunView: ("view", "views of runs"),
    Board: ("board", "boards"),
}
"""The nouns in messages for one row of a model and for several."""


def visible(model: type[S], user: AbstractBaseUser | AnonymousUser) -> QuerySet[S]:
    """A user's own rows and the shared ones, by name."""
    rows = _rows(model)
    if not isinstance(user, User) or not permissions.can_view(user):
        return rows.none()
    return rows.filter(Q(owner=user) | Q(shared=True)).order_by("name", "pk")


def to_delete(model: type[S], user: User, pk: int) -> S | None:
    """The row if ``user`` can see it; an administrator also sees private rows of others.
    :func:`can_delete` decides whether it can be deleted."""
    is_admin = permissions.has_role(user, "admin")
    return (_rows(model) if is_admin else visible(model, user)).filter(pk=pk).first()


def _rows(model: type[S]) -> QuerySet[S]:
    return QuerySet(model).select_related("owner")


def can_share(user: AbstractBaseUser | AnonymousUser) -> bool:
    return permissions.can_submit(user)


def can_delete(user: User, row: Shared) -> bool:
    return row.owner_id == user.pk or permissions.has_role(user, "admin")


def named(model: type[S], owner: User, row: S | None, *, name: str, shared: bool) -> S:
    """``row``, or a new one of ``owner``, with a name and whether it is shared; not saved."""
    if row is None:
        if model._default_manager.filter(owner=owner).count() >= PER_PERSON:
            _, several = KINDS[model]
            raise ActionRefused(
                f"expected at most {PER_PERSON} {several}, found that many: delete some"
            )
        row = model(owner=owner)
    _set_name(row, name)
    _set_shared(row, shared)
    return row


def _set_name(row: Shared, name: str) -> None:
    name = " ".join(name.split())
    if not 1 <= len(name) <= NAME_LENGTH or not name.isprintable():
        raise ActionRefused(
            f"expected a name of 1 to {NAME_LENGTH} characters, found {name[:NAME_LENGTH]!r}"
        )
    others = type(row).objects.filter(owner=row.owner, name__iexact=name).exclude(pk=row.pk)
    if others.exists():
        raise _taken(row, name)
    row.name = name


def _taken(row: Shared, name: str) -> ActionRefused:
    _, several = KINDS[type(row)]
    return ActionRefused(f"expected a name that none of your {several} has, found {name!r}")


def _set_shared(row: Shared, shared: bool) -> None:
    if shared and not row.shared and not can_share(row.owner):
        kind, _ = KINDS[type(row)]
        raise ActionRefused(f"only operators and administrators can share a {kind}")
    row.shared = shared


def change(row: S, *, name: str, shared: bool) -> S:
    """Rename a row, share it, or stop sharing it."""
    return store(named(type(row), row.owner, row, name=name, shared=shared))


def store(row: S) -> S:
    """Save a row. Raises :class:`~runs.exceptions.ActionRefused` if its name is taken, or if it was
    deleted."""
    row.changed_at = timezone.now()
    try:
        save(row)
    except AlreadyUsed:
        raise _taken(row, row.name) from None
    except DeletedMeanwhile:
        raise ActionRefused(f"{row.name!r} has been deleted meanwhile") from None
    return row


def delete(row: Shared) -> None:
    type(row).objects.filter(pk=row.pk).delete()
