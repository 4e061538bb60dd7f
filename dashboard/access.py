"""The role of a user, as shown in the menu, and lookups that pages and API share.

:mod:`runs.permissions` decides what a role can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404

from runs.backends import price_settings
from runs.models import Replica, ReplicaAttempt, Run
from runs.queries.replicas import attempts_of, replicas_of

PROBES = frozenset({"/healthz", "/readyz"})
ROLES = ("admin", "operator", "viewer")
"""Names of the Django groups, strongest first."""


Found = TypeVar("Found")


def or_404(found: Found | None) -> Found:
    """The result of a lookup. Raises :class:`Http404` if there is none."""
    if found is None:
        raise Http404
    return found


def role_of(user: AbstractBaseUser | AnonymousUser) -> str:
    """The strongest role of ``user``, '' if none. A superuser is an admin."""
    if not isinstance(user, User):
        return ""
    if user.is_superuser:
        return "admin"
    groups = {group.name for group in user.groups.all()}
    return next((role for role in ROLES if role in groups), "")


def with_fresh_prices(get_response: Callable[[HttpRequest], HttpResponse]) -> Any:
    """Middleware: read the prices that administrators set, if this process's copy is old."""

    def respond(request: HttpRequest) -> HttpResponse:
        if request.path not in PROBES:  # they work without the database
            price_settings.refresh()
        return get_response(request)

    return respond


def replica_or_404(run: Run, number: int) -> Replica:
    replica = get_object_or_404(replicas_of(run), number=number)
    replica.run = run
    return replica


def attempt_or_404(run: Run, number: int, attempt: int) -> ReplicaAttempt:
    """The attempt of the replica ``number``."""
    return get_object_or_404(attempts_of(run), replica__number=number, number=attempt)
