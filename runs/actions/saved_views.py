"""Views of the runs list that people keep: saved, changed, taken away.

Everybody with a role keeps views for themselves. Operators and administrators may share one:
everybody sees it then, and only its owner changes it. An administrator may delete any. A person's
views have different names, in any case of letters. Left out: events and the journal, because a view
is nothing of a run's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from runs import permissions
from runs.exceptions import CannotDo
from runs.models import SavedView
from runs.queries import table
from runs.queries.listing import Order
from runs.queries.search import BadQuery, parse

NAME_LENGTH = 80
PER_PERSON = 100


def views_for(user: AbstractBaseUser | AnonymousUser) -> QuerySet[SavedView]:
    """A person's own and those that are shared, by name."""
    if not isinstance(user, User) or not permissions.may_look(user):
        return SavedView.objects.none()
    views = SavedView.objects.select_related("owner")
    return views.filter(Q(owner=user) | Q(shared=True)).order_by("name", "pk")


def view_to_delete(user: User, view_id: int) -> SavedView | None:
    """None for what is not there for ``user``: an administrator finds private ones of others too.
    Whether a found one may be deleted is :func:`may_delete`'s."""
    every = SavedView.objects.select_related("owner")
    views = every if permissions.has_role(user, "admin") else views_for(user)
    return views.filter(pk=view_id).first()


def may_share(user: AbstractBaseUser | AnonymousUser) -> bool:
    return permissions.may_submit(user)


def may_delete(user: User, view: SavedView) -> bool:
    return view.owner_id == user.pk or permissions.has_role(user, "admin")


def save(
    owner: User,
    *,
    name: str,
    query: str = "",
    sort: str = "",
    columns: Iterable[str] = (),
    differing: bool = False,
    shared: bool = False,
) -> SavedView:
    """A new view. Raises :class:`CannotDo` with what is wrong about it."""
    if SavedView.objects.filter(owner=owner).count() >= PER_PERSON:
        raise CannotDo(f"expected at most {PER_PERSON} views, found that many: delete some")
    view = SavedView(owner=owner)
    _name(view, name)
    _share(view, shared)
    _show(view, query=query, sort=sort, columns=columns, differing=differing)
    return _store(view)


def change(view: SavedView, *, name: str | None = None, shared: bool | None = None) -> SavedView:
    """Another name, or shared from now on, or no longer."""
    if name is not None:
        _name(view, name)
    if shared is not None:
        _share(view, shared)
    return _store(view)


def replace(
    view: SavedView, *, query: str, sort: str, columns: Iterable[str], differing: bool
) -> SavedView:
    """Show something else under the same name."""
    _show(view, query=query, sort=sort, columns=columns, differing=differing)
    return _store(view)


def delete(view: SavedView) -> None:
    SavedView.objects.filter(pk=view.pk).delete()


def row(view: SavedView, *, user: User) -> dict[str, Any]:
    """As the API has it."""
    return {
        "id": view.pk,
        "name": view.name,
        "owner": view.owner.get_username(),
        "mine": view.owner_id == user.pk,
        "shared": view.shared,
        "query": view.query,
        "sort": view.sort,
        "columns": view.columns,
        "differing": view.differing,
    }


def _name(view: SavedView, name: str) -> None:
    name = " ".join(name.split())
    if not 1 <= len(name) <= NAME_LENGTH or not name.isprintable():
        raise CannotDo(
            f"expected a name of 1 to {NAME_LENGTH} characters, found {name[:NAME_LENGTH]!r}"
        )
    others = SavedView.objects.filter(owner=view.owner, name__iexact=name).exclude(pk=view.pk)
    if others.exists():
        raise CannotDo(f"expected a name that none of your views has, found {name!r}")
    view.name = name


def _share(view: SavedView, shared: bool) -> None:
    if shared and not view.shared and not may_share(view.owner):
        raise CannotDo("expected an operator or an administrator, who may share a view")
    view.shared = shared


def _show(
    view: SavedView, *, query: str, sort: str, columns: Iterable[str], differing: bool
) -> None:
    query = query.strip()
    try:
        parse(query)
    except BadQuery as error:
        raise CannotDo(f"query: {error}") from error
    picked = table.chosen(columns)
    view.query, view.sort = query, str(Order.of(sort))
    view.columns = [] if picked == table.DEFAULT else list(picked)
    view.differing = differing


def _store(view: SavedView) -> SavedView:
    view.changed_at = timezone.now()
    try:
        with transaction.atomic():
            view.save()
    except IntegrityError:  # two requests at once
        raise CannotDo(
            f"expected a name that none of your views has, found {view.name!r}"
        ) from None
    return view
