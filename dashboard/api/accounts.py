"""Credentials, webhooks and the state of backends, for administrators. Secrets are never returned,
except for the generated signing secret of a new webhook."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from django.contrib.auth.models import User
from django.http import HttpRequest
from ninja import Path, Router, Status
from pydantic import BaseModel, Field

from archipelago import frame_rows as shared
from dashboard.access import or_404
from dashboard.api.auth import ADMINISTRATORS, administrator, reader
from dashboard.api.problems import Invalid, at
from dashboard.api.types import NO_NUL, Body, RowId, responses
from dashboard.forms import credentials as forms
from executors.registry import BACKENDS
from runs.actions import backends as backend_actions
from runs.actions import credentials as credential_actions
from runs.actions import webhooks as webhook_actions
from runs.admin.credential_form import remember_secrets
from runs.alerts.rules import KINDS
from runs.exceptions import ActionRefused
from runs.models import Credential
from runs.queries import settings_rows

router = Router(tags=["accounts"])

Text = Annotated[str, Field(max_length=100_000, pattern=NO_NUL)]
Name = Annotated[str, Field(min_length=1, max_length=80, pattern=NO_NUL)]
Names = Annotated[list[Annotated[str, Field(max_length=80, pattern=NO_NUL)]], Field(max_length=50)]


class CredentialChange(Body):
    """``secrets`` are environment variables; those that are left out keep their value, and those in
    ``remove`` are deleted. ``options`` and ``allowed_pool_options`` replace the stored ones."""

    name: Name
    secrets: Annotated[dict[str, Text], Field(max_length=50)] = Field(default_factory=dict)
    remove: Names = Field(default_factory=list)
    options: dict[str, Any] = Field(default_factory=dict)
    allowed_pool_options: dict[str, Any] = Field(default_factory=dict)


class NewCredential(CredentialChange):
    """``kind`` is a backend, or a kind of bucket: s3, gs, az, hf-store."""

    kind: Name


class TestPlace(Body):
    """``uri``: the prefix to test a bucket's credential with; by default the one that it names."""

    uri: Annotated[str, Field(max_length=500, pattern=NO_NUL)] = ""


class Tested(BaseModel):
    """``message`` is the identity that the backend reports, or the error."""

    ok: bool
    message: str


class WebhookBody(Body):
    """``kinds`` are kinds of alerts. Without ``secret`` a webhook keeps its own, and for a new one
    a secret is generated, which the answer shows once."""

    name: Name
    url: Annotated[str, Field(max_length=webhook_actions.URL_LENGTH, pattern=NO_NUL)]
    kinds: Annotated[
        list[Literal[tuple(KINDS)]],  # type: ignore[valid-type]
        Field(max_length=len(KINDS)),
    ] = Field(default_factory=lambda: list(webhook_actions.USUAL))
    enabled: bool = True
    secret: Annotated[str, Field(max_length=webhook_actions.SECRET_LENGTH, pattern=NO_NUL)] = ""


class Account(Body):
    """``credential`` is a name; null for the server's own environment."""

    backend: Literal[tuple(BACKENDS)]  # type: ignore[valid-type]
    credential: Name | None = None


class Reset(BaseModel):
    pools: int


@router.get(
    "/credentials",
    auth=ADMINISTRATORS,
    response=responses(list[shared.Credential], but=(404, 409, 413, 422)),
)
def list_credentials(request: HttpRequest) -> Any:
    """All credentials, without their secrets."""
    administrator(request)
    return settings_rows.credential_rows()


@router.post(
    "/credentials",
    auth=ADMINISTRATORS,
    response=responses(shared.Credential, status=201, but=(404, 409)),
)
def create_credential(request: HttpRequest, body: NewCredential) -> Any:
    """Store a credential, encrypted."""
    user = administrator(request)
    kind = credential_actions.kinds().get(body.kind)
    if kind is None:
        expected = ", ".join(credential_actions.kinds())
        raise Invalid([at("kind", f"expected one of {expected}, found {body.kind!r}")])
    return Status(201, _save(user, body, kind, None))


@router.put(
    "/credentials/{int:credential_id}",
    auth=ADMINISTRATORS,
    response=responses(shared.Credential, but=(409,)),
)
def change_credential(request: HttpRequest, credential_id: RowId, body: CredentialChange) -> Any:
    """Change a credential, or rotate its secrets."""
    user, found = administrator(request), or_404(settings_rows.credential(credential_id))
    return _save(user, body, credential_actions.kind_of_credential(found), found)


@router.delete(
    "/credentials/{int:credential_id}",
    auth=ADMINISTRATORS,
    response=responses(list[shared.Credential], but=(413,)),
)
def delete_credential(request: HttpRequest, credential_id: RowId) -> Any:
    """Delete a credential that no run uses. Returns the remaining ones."""
    user, found = administrator(request), or_404(settings_rows.credential(credential_id))
    try:
        credential_actions.delete_credential(found, actor=user)
    except credential_actions.InUse as error:
        raise ActionRefused(str(error)) from None
    return settings_rows.credential_rows()


@router.post(
    "/credentials/{int:credential_id}/test",
    auth=ADMINISTRATORS,
    response=responses(Tested, but=(409,)),
)
def check_credential(
    request: HttpRequest, credential_id: RowId, body: TestPlace | None = None
) -> Any:
    """Check the identity at the backend, or the needed operations in the bucket."""
    administrator(request)
    found = or_404(settings_rows.credential(credential_id))
    tested = credential_actions.test_credential(found, body.uri if body else "")
    return {"ok": tested.ok, "message": tested.message}


@router.get(
    "/webhooks",
    auth=ADMINISTRATORS,
    response=responses(list[shared.Webhook], but=(404, 409, 413, 422)),
)
def list_webhooks(request: HttpRequest) -> Any:
    """All webhooks, without their secrets."""
    administrator(request)
    return settings_rows.webhook_rows()


@router.post(
    "/webhooks",
    auth=ADMINISTRATORS,
    response=responses(shared.NewWebhook, status=201, but=(404, 409)),
)
def create_webhook(request: HttpRequest, body: WebhookBody) -> Any:
    """Add a webhook that receives alerts."""
    user = administrator(request)
    hook, secret = webhook_actions.save_webhook(**body.model_dump(), actor=user)
    return Status(201, {**settings_rows.webhook_row(hook), "secret": secret})


@router.put(
    "/webhooks/{int:webhook_id}",
    auth=ADMINISTRATORS,
    response=responses(shared.Webhook, but=(409,)),
)
def change_webhook(request: HttpRequest, webhook_id: RowId, body: WebhookBody) -> Any:
    """Change a webhook."""
    user, found = administrator(request), or_404(settings_rows.webhook(webhook_id))
    hook, _ = webhook_actions.save_webhook(**body.model_dump(), actor=user, hook=found)
    return settings_rows.webhook_row(hook)


@router.delete(
    "/webhooks/{int:webhook_id}",
    auth=ADMINISTRATORS,
    response=responses(list[shared.Webhook], but=(409, 413)),
)
def delete_webhook(request: HttpRequest, webhook_id: RowId) -> Any:
    """Delete a webhook and the list of its deliveries. Returns the remaining webhooks."""
    user, found = administrator(request), or_404(settings_rows.webhook(webhook_id))
    webhook_actions.delete_webhook(found, actor=user)
    return settings_rows.webhook_rows()


@router.post(
    "/webhooks/{int:webhook_id}/test",
    auth=ADMINISTRATORS,
    response=responses(shared.Delivery, status=202, but=(409, 413)),
)
def send_webhook_test(request: HttpRequest, webhook_id: RowId) -> Any:
    """Send a test message; its deliveries show the result."""
    user, found = administrator(request), or_404(settings_rows.webhook(webhook_id))
    delivery = webhook_actions.send_test(found, actor=user)
    return Status(202, settings_rows.delivery_row(delivery))


@router.get(
    "/webhooks/{int:webhook_id}/deliveries",
    auth=ADMINISTRATORS,
    response=responses(list[shared.Delivery], but=(409, 413)),
)
def list_deliveries(request: HttpRequest, webhook_id: RowId) -> Any:
    """The newest deliveries of a webhook."""
    administrator(request)
    return settings_rows.delivery_rows(or_404(settings_rows.webhook(webhook_id)))


@router.post(
    "/webhooks/deliveries/{uuid:delivery_id}/repeat",
    auth=ADMINISTRATORS,
    response=responses(shared.Delivery, but=(409, 413)),
)
def repeat_delivery(
    request: HttpRequest, delivery_id: Annotated[UUID, Path(description="Of the delivery")]
) -> Any:
    """Send a finished delivery again."""
    user, found = administrator(request), or_404(settings_rows.delivery(delivery_id))
    webhook_actions.send_again(found, actor=user)
    found.refresh_from_db()
    return settings_rows.delivery_row(found)


@router.get(
    "/backends/state", response=responses(list[shared.BackendState], but=(404, 409, 413, 422))
)
def get_backend_state(request: HttpRequest) -> Any:
    """The accounts that active runs use, with their circuit breakers, the worst first."""
    reader(request)
    return settings_rows.backend_rows()


@router.post("/backends/reset", auth=ADMINISTRATORS, response=responses(Reset, but=(409,)))
def reset_backend(request: HttpRequest, body: Account) -> Any:
    """Close the circuit breakers of an account's pools, so that they launch at once."""
    user = administrator(request)
    credential = settings_rows.credential_named(body.credential) if body.credential else None
    if body.credential and credential is None:
        raise Invalid([at("credential", f"expected a credential, found {body.credential!r}")])
    return {"pools": backend_actions.reset_account(body.backend, credential, actor=user)}


def _save(
    user: User, body: CredentialChange, kind: Any, found: Credential | None
) -> dict[str, Any]:
    unknown = set(body.secrets) - {variable.name for variable in kind.variables}
    if unknown:
        expected = ", ".join(variable.name for variable in kind.variables)
        raise Invalid([at("secrets", f"expected {expected}, found {min(unknown)!r}")])
    data = forms.form_data(
        name=body.name,
        secrets=body.secrets,
        options=body.options,
        allowed=body.allowed_pool_options,
        cleared=body.remove,
        kind=kind,
    )
    remember_secrets(data)
    form = forms.credential_form(kind, found, data)
    if not form.is_valid():
        raise Invalid(
            at(forms.field_of(name), str(message))
            for name, messages in form.errors.items()
            for message in messages
        )
    saved = form.store(actor=user)
    return settings_rows.credential_rows([saved])[0]
