"""Users and roles, for administrators, and the caller's own API tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.contrib.auth.models import User
from django.http import HttpRequest
from django.urls import reverse
from ninja import Path, Query, Router, Status
from ninja.errors import AuthorizationError
from pydantic import BaseModel, Field

from archipelago import frame_rows as shared
from dashboard.access import or_404, role_of
from dashboard.api.auth import ADMINISTRATORS, administrator, caller, keeper
from dashboard.api.problems import Invalid, at
from dashboard.api.types import NO_NUL, Body, RowId, responses
from dashboard.forms.users import PersonForm
from runs.actions import api_tokens
from runs.actions import users as actions
from runs.exceptions import ActionRefused
from runs.queries import settings_rows

router = Router(tags=["people"])

PAGE = 200
UserName = Annotated[str, Path(max_length=150, pattern=NO_NUL)]


class NewPerson(Body):
    name: Annotated[str, Field(min_length=1, max_length=150, pattern=NO_NUL)]
    role: Literal["viewer", "operator", "admin"] = "viewer"


class PersonChange(Body):
    """Fields that are left out do not change."""

    role: Literal["viewer", "operator", "admin"] | None = None
    active: bool | None = None


class TokenBody(Body):
    """``scope`` includes the weaker ones; ``days`` null: it does not expire."""

    name: Annotated[str, Field(min_length=1, max_length=api_tokens.NAME_LENGTH, pattern=NO_NUL)]
    scope: Literal[tuple(api_tokens.SCOPES)] = "read"  # type: ignore[valid-type]
    days: Annotated[int, Field(ge=1, le=api_tokens.LONGEST_DAYS)] | None = 90


class NewToken(BaseModel):
    token: shared.Token
    text: str


@router.get(
    "/users", auth=ADMINISTRATORS, response=responses(list[shared.Person], but=(404, 409, 413))
)
def list_users(
    request: HttpRequest,
    q: Annotated[str, Query(max_length=150, pattern=NO_NUL, description="Part of a name")] = "",
    after: Annotated[
        str, Query(max_length=150, pattern=NO_NUL, description="Last name of the previous page")
    ] = "",
) -> Any:
    """Users by name, at most 200."""
    administrator(request)
    found = actions.users()
    if q:
        found = found.filter(username__icontains=q)
    if after:
        found = found.filter(username__gt=after)
    return [_row(person) for person in found[:PAGE]]


@router.post(
    "/users", auth=ADMINISTRATORS, response=responses(shared.PersonLink, status=201, but=(404, 409))
)
def add_user(request: HttpRequest, body: NewPerson) -> Any:
    """Add a user. The answer has a link with which the user chooses a password."""
    actor = administrator(request)
    form = PersonForm({"name": body.name, "role": body.role})
    if not form.is_valid():
        raise Invalid(at(name, str(m)) for name, found in form.errors.items() for m in found)
    try:
        person = actions.add_person(form.cleaned_data["name"], role=body.role, actor=actor)
    except ValueError as error:
        raise Invalid([at("name", str(error))]) from None
    return Status(201, {**_row(person), "link": _link(request, person)})


@router.patch("/users/{name}", auth=ADMINISTRATORS, response=responses(shared.Person, but=()))
def change_user(request: HttpRequest, name: UserName, body: PersonChange) -> Any:
    """Change a user's role, or deactivate or activate the account."""
    actor, person = administrator(request), or_404(settings_rows.person(name))
    try:
        if body.role is not None:
            actions.set_role(person, body.role, actor=actor)
        if body.active is not None:
            change = actions.activate if body.active else actions.deactivate
            change(person, actor=actor)
    except ValueError as error:
        raise ActionRefused(str(error)) from None
    return _row(or_404(settings_rows.person(name)))


@router.post(
    "/users/{name}/reset", auth=ADMINISTRATORS, response=responses(shared.PersonLink, but=(413,))
)
def reset_password(request: HttpRequest, name: UserName) -> Any:
    """Invalidate a user's password and end their sessions. The answer has a link for a new one."""
    actor, person = administrator(request), or_404(settings_rows.person(name))
    if person.pk == actor.pk or not person.is_active:
        raise ActionRefused("expected another user, whose account is active")
    try:
        actions.reset_password(person, actor=actor)
    except ValueError as error:
        raise ActionRefused(str(error)) from None
    return {**_row(person), "link": _link(request, person)}


@router.get("/tokens", response=responses(list[shared.Token], but=(403, 404, 409, 413, 422)))
def list_tokens(request: HttpRequest) -> Any:
    """The caller's own tokens that are not revoked."""
    return settings_rows.token_rows(api_tokens.tokens_of(caller(request).user))


@router.post("/tokens", response=responses(NewToken, status=201, but=(404, 409)))
def create_token(request: HttpRequest, body: TokenBody) -> Any:
    """Create a token; its text is shown once. Only with a session: a token that leaked could
    otherwise outlive its revocation."""
    who = caller(request)
    if who.token:
        raise AuthorizationError(message="expected a session of a page, found a token")
    try:
        token, text = api_tokens.issue(
            who.user, name=body.name, scopes=[body.scope], days=body.days
        )
    except ValueError as error:
        raise Invalid([at("name", str(error))]) from None
    return Status(201, {"token": settings_rows.token_rows([token])[0], "text": text})


@router.delete("/tokens/{int:token_id}", response=responses(list[shared.Token], but=(409, 413)))
def revoke_token(request: HttpRequest, token_id: RowId) -> Any:
    """Revoke one of the caller's own tokens. Returns the remaining ones."""
    user = keeper(request)
    api_tokens.revoke(or_404(api_tokens.tokens_of(user).filter(pk=token_id).first()))
    return settings_rows.token_rows(api_tokens.tokens_of(user))


def _row(person: User) -> dict[str, Any]:
    return settings_rows.person_row(person, role=role_of(person))


def _link(request: HttpRequest, person: User) -> str:
    uid, token = actions.link_parts(person)
    return request.build_absolute_uri(reverse("choose-password", args=[uid, token]))
