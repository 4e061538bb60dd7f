"""Authentication of API requests: an API token, or the session of a signed-in page.

A token is sent as ``Authorization: Bearer arch_...`` (RFC 6750). It needs no CSRF token, because no
browser sends it by itself. A session needs one (``X-CSRFToken``) for every request that changes
something; see https://docs.djangoproject.com/en/5.2/howto/csrf/. A request with an invalid token is
rejected, even if it also carries a valid session cookie.

The role of the token's owner decides what the token can do (:mod:`runs.permissions`); a scope only
restricts it further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import User
from django.http import HttpRequest
from django.shortcuts import get_object_or_404
from django.utils import timezone
from ninja.errors import AuthenticationError, AuthorizationError
from ninja.security import HttpBearer
from ninja.security.session import SessionAuth

from runs import permissions
from runs.actions import api_tokens
from runs.models import ReplicaPool, Run
from runs.queries import selectors

READ, OPERATE, ADMIN = "read", "operate", "admin"


@dataclass(frozen=True, kw_only=True)
class Caller:
    """An authenticated user. A session has all scopes; ``token`` is the name of the token."""

    user: User
    scopes: frozenset[str]
    token: str = ""


class ByToken(HttpBearer):
    """``Authorization: Bearer <token>``.

    ``check`` rejects a caller who cannot use the operation. Ninja authenticates a request before it
    parses the body, so the body of such a caller is never parsed.
    """

    def __init__(self, *, check: Callable[[Caller], Any] = lambda _: None) -> None:
        super().__init__()
        self.check = check

    def __call__(self, request: HttpRequest) -> Caller | None:
        if not request.headers.get(self.header):
            return None
        identified: Caller | None = super().__call__(request)
        if identified is None:
            raise AuthenticationError(
                message="expected a valid token of this server, found one that is unknown, "
                "expired or revoked"
            )
        self.check(identified)
        return identified

    def authenticate(self, request: HttpRequest, token: str) -> Caller | None:
        row = api_tokens.find(token, now=timezone.now())
        if row is None:
            return None
        request.user = row.owner
        return Caller(user=row.owner, scopes=frozenset(row.scopes), token=row.name)


class BySession(SessionAuth):
    """The session cookie of a user who is signed in."""

    def __init__(
        self, *, csrf: bool = True, check: Callable[[Caller], Any] = lambda _: None
    ) -> None:
        super().__init__(csrf=csrf)
        self.check = check

    def authenticate(self, request: HttpRequest, key: str | None) -> Caller | None:
        if not isinstance(request.user, User):
            return None
        identified = Caller(user=request.user, scopes=frozenset(api_tokens.SCOPES))
        self.check(identified)
        return identified


def caller(request: HttpRequest) -> Caller:
    """The caller of an authenticated request."""
    authenticated: Any = request
    assert isinstance(authenticated.auth, Caller)
    return authenticated.auth


def reader(request: HttpRequest) -> User:
    """The caller, if they can view runs."""
    return _check_reader(caller(request))


def submitter(request: HttpRequest) -> User:
    """The caller, if they can create runs."""
    return check_submitter(caller(request))


def check_submitter(who: Caller) -> User:
    """The caller's user. Raises :class:`AuthorizationError` unless they can create runs."""
    user = _check_operator(who)
    if not permissions.can_submit(user):
        raise AuthorizationError(message=f"expected an operator, found {user}, a viewer")
    return user


def check_administrator(who: Caller) -> User:
    """The caller's user. Raises :class:`AuthorizationError` unless they are an administrator whose
    token has the scope for that."""
    if ADMIN not in who.scopes:
        raise AuthorizationError(message=f"expected the scope {ADMIN}, found {_scopes(who)}")
    if not permissions.has_role(who.user, "admin"):
        raise AuthorizationError(message=f"expected an administrator, found {who.user}")
    return who.user


def administrator(request: HttpRequest) -> User:
    """The caller, if they are an administrator."""
    return check_administrator(caller(request))


AUTH = [ByToken(), BySession()]

OPERATORS = [ByToken(check=check_submitter), BySession(check=check_submitter)]
"""Authentication of every operation that changes runs or checks a submitted one."""

ADMINISTRATORS = [ByToken(check=check_administrator), BySession(check=check_administrator)]
"""Authentication of every operation that changes settings of the server."""


def keeper(request: HttpRequest) -> User:
    """The caller, if they can view runs and their token can change something."""
    return _check_operator(caller(request))


def run_to_see(request: HttpRequest, run_id: Any) -> Run:
    return get_object_or_404(selectors.runs_for(reader(request)), pk=run_id)


def run_to_operate(request: HttpRequest, run_id: Any) -> tuple[Run, User]:
    user = keeper(request)
    run = run_to_see(request, run_id)
    if not permissions.can_operate(user, run):
        raise AuthorizationError(
            message="expected the run's owner, an operator, or an administrator, found "
            f"{user}, who can only view it"
        )
    return run, user


def pool_of(run: Run, pool_id: int) -> ReplicaPool:
    return get_object_or_404(run.pools, pk=pool_id)


def _check_operator(who: Caller) -> User:
    if OPERATE not in who.scopes:
        raise AuthorizationError(message=f"expected the scope {OPERATE}, found {_scopes(who)}")
    return _check_reader(who)


def _check_reader(who: Caller) -> User:
    if READ not in who.scopes:
        raise AuthorizationError(message=f"expected the scope {READ}, found {_scopes(who)}")
    if not permissions.can_view(who.user):
        raise AuthorizationError(
            message=f"expected a role, found none for {who.user}: an administrator can assign one"
        )
    return who.user


def _scopes(who: Caller) -> str:
    return ", ".join(sorted(who.scopes)) or "none"
