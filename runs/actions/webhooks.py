"""Save, test and delete webhooks. The caller checks that the user is an administrator."""

from __future__ import annotations

from collections.abc import Sequence

from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from runs import audit, outbound
from runs.actions.saving import AlreadyUsed, DeletedMeanwhile, save
from runs.alerts import webhooks
from runs.alerts.rules import KINDS
from runs.exceptions import InvalidRun
from runs.models import Webhook, WebhookDelivery

NAME_LENGTH, URL_LENGTH, SECRET_LENGTH = 80, 500, 120
USUAL = ("finished", "stalled", "below_quorum", "nan", "budget", "shared_budget")
"""Kinds of alerts that a new webhook is subscribed to."""


def save_webhook(
    *,
    name: str,
    url: str,
    kinds: Sequence[str],
    enabled: bool = True,
    secret: str = "",
    actor: User,
    hook: Webhook | None = None,
) -> tuple[Webhook, str]:
    """Create a webhook, or change one. Returns it with its secret if that is new, otherwise ''.

    An empty ``secret`` keeps that of a webhook, and generates one for a new webhook. Raises
    :class:`InvalidRun` with the name of the wrong field.
    """
    check_webhook(name, url, kinds, secret)
    row = hook or Webhook(created_by=actor, created_at=timezone.now())
    row.name, row.url, row.enabled = name.strip(), url, enabled
    row.kinds = [kind for kind in KINDS if kind in kinds]
    if hook is None and not secret:
        secret = webhooks.new_secret()
    if secret:
        row.sealed = webhooks.sealed_secret(secret)
    try:
        with transaction.atomic():
            save(row)
            detail = f"{row.url}; {', '.join(row.kinds)}; {'on' if enabled else 'off'}"
            audit.record("webhook.saved", actor=actor, target=f"webhook {row}", detail=detail)
    except AlreadyUsed:
        raise InvalidRun("name", f"expected an unused name, found {row.name!r}") from None
    except DeletedMeanwhile:
        raise InvalidRun("", "the webhook has been deleted meanwhile") from None
    return row, secret


def check_webhook(name: str, url: str, kinds: Sequence[str], secret: str) -> None:
    """Raise :class:`InvalidRun` with the name of the wrong field."""
    if not 1 <= len(name.strip()) <= NAME_LENGTH:
        raise InvalidRun("name", f"expected 1 to {NAME_LENGTH} characters, found {len(name)}")
    if not url.startswith(("http://", "https://")) or len(url) > URL_LENGTH:
        raise InvalidRun("url", f"expected an address with http:// or https://, found {url[:80]!r}")
    try:
        outbound.check_url(url)
    except ValueError as error:
        raise InvalidRun("url", str(error)) from None
    if unknown := set(kinds) - KINDS.keys():
        raise InvalidRun("kinds", f"expected kinds of {', '.join(KINDS)}, found {min(unknown)!r}")
    if secret:
        try:
            webhooks.key_of(secret)
        except webhooks.BadSecret as error:
            raise InvalidRun("secret", str(error)) from None


def delete_webhook(hook: Webhook, *, actor: User) -> None:
    """Delete a webhook and the list of its deliveries."""
    with transaction.atomic():
        audit.record("webhook.deleted", actor=actor, target=f"webhook {hook}")
        Webhook.objects.filter(pk=hook.pk).delete()


def send_test(hook: Webhook, *, actor: User) -> WebhookDelivery:
    """Send a test message. A worker delivers it; its result is among the deliveries."""
    with transaction.atomic():
        audit.record("webhook.tested", actor=actor, target=f"webhook {hook}")
        return webhooks.send_test(hook, actor=actor.get_username())


def send_again(delivery: WebhookDelivery, *, actor: User) -> bool:
    """Repeat a finished delivery; False if it is still waiting."""
    with transaction.atomic():
        audit.record("webhook.repeated", actor=actor, target=f"delivery {delivery.pk}")
        return webhooks.send_again(delivery)
