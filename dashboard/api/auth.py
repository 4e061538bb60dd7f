"""Who asks: a program with a token, or a page with its session.

A token is sent as ``Authorization: Bearer arch_...`` (RFC 6750) and needs no CSRF token, because no
browser sends it by itself. A session does, for everything that changes something: ``X-CSRFToken``,
as https://docs.djangoproject.com/en/5.2/howto/csrf/ has it. A request that has a token stands or
falls with it: a bad one is never made good by a cookie.

What a person may do is decided in :mod:`runs.queries.selectors`, for the owner of the token as for
anybody; a scope only takes away from that.
"""

from __future__ import annotations

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
from runs.models import Replica, ReplicaPool, Run
from runs.queries import selectors

READ, OPERATE = "read", "operate"


@dataclass(frozen=True, kw_only=True)
class Caller:
    """``scopes`` of a session are all there are: its person may do what the pages let them do."""

    user: User
    scopes: frozenset[str]
    token: str = ""


class ByToken(HttpBearer):
    """``Authorization: Bearer <token>``.

    ``operators_only``: refuse a caller who cannot change runs. Ninja authenticates a request before
    it parses its body, so the server parses no body of such a caller.
    """

    def __init__(self, *, operators_only: bool = False) -> None:
        super().__init__()
        self.operators_only = operators_only

    def __call__(self, request: HttpRequest) -> Caller | None:
        if not request.headers.get(self.header):
            return None
        found: Caller | None = super().__call__(request)
        if found is None:
            raise AuthenticationError(
                message="expected a token of this server that is valid, found one that is unknown, "
                "expired or revoked"
            )
        if self.operators_only:
            check_submitter(found)
        return found

    def authenticate(self, request: HttpRequest, token: str) -> Caller | None:
        found = api_tokens.find(token, now=timezone.now())
        if found is None:
            return None
        request.user = found.owner
        return Caller(user=found.owner, scopes=frozenset(found.scopes), token=found.name)


class BySession(SessionAuth):
    """The session cookie of a user who has signed in on the pages."""

    def __init__(self, *, csrf: bool = True, operators_only: bool = False) -> None:
        super().__init__(csrf=csrf)
        self.operators_only = operators_only

    def authenticate(self, request: HttpRequest, key: str | None) -> Caller | None:
        if not isinstance(request.user, User):
            return None
        found = Caller(user=request.user, scopes=frozenset(api_tokens.SCOPES))
        if self.operators_only:
            check_submitter(found)
        return found


AUTH = [ByToken(), BySession()]


OPERATORS = [ByToken(operators_only=True), BySession(operators_only=True)]
"""For every operation that changes runs or checks a submitted one."""


def caller(request: HttpRequest) -> Caller:
    """Of a request that was let in."""
    found: Any = request
    assert isinstance(found.auth, Caller)
    return found.auth


def reader(request: HttpRequest) -> User:
    """A user who can see runs."""
    return _check_reader(caller(request))


def submitter(request: HttpRequest) -> User:
    """A user who can create runs."""
    return check_submitter(caller(request))


def check_submitter(who: Caller) -> User:
    """The user of a caller who can create runs; raises :class:`AuthorizationError`."""
    user = _check_operator(who)
    if not permissions.may_submit(user):
        raise AuthorizationError(message=f"expected an operator, found {user}, who only watches")
    return user


def keeper(request: HttpRequest) -> User:
    """Somebody who may look at runs, with a token that may change something: what is their own."""
    return _operator(request)


def run_to_see(request: HttpRequest, run_id: Any) -> Run:
    return get_object_or_404(selectors.runs_for(reader(request)), pk=run_id)


def run_to_operate(request: HttpRequest, run_id: Any) -> tuple[Run, User]:
    user = _operator(request)
    run = run_to_see(request, run_id)
    if not permissions.may_operate(user, run):
        raise AuthorizationError(
            message="expected the run's owner, an operator, or an administrator, found "
            f"{user}, who may only watch it"
        )
    return run, user


def replica_of(run: Run, number: int) -> Replica:
    found = Replica.objects.select_related("pool__credential")
    replica = get_object_or_404(found, run=run, number=number)
    replica.run = run
    return replica


def pool_of(run: Run, pool_id: int) -> ReplicaPool:
    return get_object_or_404(run.pools, pk=pool_id)


def _operator(request: HttpRequest) -> User:
    return _check_operator(caller(request))


def _check_operator(who: Caller) -> User:
    if OPERATE not in who.scopes:
        raise AuthorizationError(message=f"expected the scope {OPERATE}, found {_scopes(who)}")
    return _check_reader(who)


def _check_reader(who: Caller) -> User:
    if READ not in who.scopes:
        raise AuthorizationError(message=f"expected the scope {READ}, found {_scopes(who)}")
    if not permissions.may_look(who.user):
        raise AuthorizationError(
            message=f"expected a role, found none for {who.user}: an administrator can give one"
        )
    return who.user


def _scopes(who: Caller) -> str:
    return ", ".join(sorted(who.scopes)) or "none"
