"""Alerts, told to addresses outside: signed, tried again, kept.

A delivery is stored first and sent afterwards by a worker, never inside a transaction. Whoever
sends it claims it by a conditional UPDATE, so that two workers do not send it at once; one that
dies leaves a claim that runs out. An address that answers anything but 2xx, or nothing, is tried
again after each of :data:`WAITS`. It may therefore hear of something twice, and tells by the id.

Signed as https://www.standardwebhooks.com has it, whose libraries can check it: the headers
``webhook-id``, ``webhook-timestamp`` and ``webhook-signature``, which is ``v1,`` and the base64 of
HMAC-SHA256 over ``id.timestamp.body``, with the bytes behind ``whsec_`` as the key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import http.client
import json
import secrets
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F
from django.utils import timezone

from executors.base import NeedsPerson
from runs.alerts.rules import KINDS
from runs.credentials.vault import seal, unseal
from runs.json_values import iso
from runs.models import Alert, Webhook, WebhookDelivery
from runs.outbound import open_url
from runs.task_queue import enqueue
from runs.times import due
from runs.transitions import clean_text

State = WebhookDelivery.State

TEST = "test"
PREFIX = "whsec_"
SHORTEST_KEY, LONGEST_KEY = 24, 64
TIMEOUT_S = 10.0
CLAIM = timedelta(seconds=60)
"""How long whoever sends it has; then it counts as not sent."""
WAITS = tuple(timedelta(seconds=s) for s in (10, 60, 300, 1800, 7200, 21_600, 43_200))
"""After the first attempt, the second and so on; then it has failed. About a day in all."""
KEPT = timedelta(days=30)
AT_ONCE = 200
SHOWN = 500
"""Characters of an answer that are kept."""


class BadSecret(ValueError):
    """A signing secret that is none."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """``status`` None: there was no answer, and ``said`` is why."""

    status: int | None
    said: str

    @property
    def well(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


# Secrets.


def new_secret() -> str:
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def sealed_secret(text: str) -> str:
    """As it is stored. Raises :class:`BadSecret`."""
    key_of(text)
    return seal({"SECRET": text})


def key_of(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not secret.startswith(PREFIX) or not SHORTEST_KEY <= len(key) <= LONGEST_KEY:
        raise BadSecret(
            f"expected {PREFIX} and {SHORTEST_KEY} to {LONGEST_KEY} bytes in base64, found "
            f"{len(key)} bytes"
        )
    return key


def sign(secret: str, *, id: str, timestamp: int, body: bytes) -> str:
    signed = f"{id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key_of(secret), signed, hashlib.sha256)).decode()


# What is told.


def announce(alert: Alert) -> list[WebhookDelivery]:
    """A delivery to every address that wants to hear of that kind, and of that run."""
    told = alert.run.notify
    hooks = [
        hook
        for hook in Webhook.objects.filter(enabled=True)
        if alert.kind in hook.kinds and (told is None or hook.pk in told)
    ]
    once = f"alert {alert.pk} {alert.times}"
    found = [_store(hook, alert.kind, _said_of(alert), run=alert.run, once=once) for hook in hooks]
    return [delivery for delivery in found if delivery is not None]


def send_test(hook: Webhook, *, actor: str) -> WebhookDelivery:
    made = _store(hook, TEST, {"message": f"a test, sent by {actor}"})
    assert made is not None
    return made


def _said_of(alert: Alert) -> dict[str, Any]:
    run = alert.run
    return {
        "run": {
            "id": str(run.pk), "name": run.name, "owner": run.owner.get_username(),
            "state": str(run.state), "state_reason": run.state_reason,
            "committed_rounds": run.committed_rounds, "total_rounds": run.total_rounds,
            "tokens": run.tokens, "cost_usd": run.cost_usd,
        },
        "alert": {
            "kind": alert.kind, "title": KINDS.get(alert.kind, alert.kind), "level": alert.level,
            "subject": alert.subject, "opened_at": iso(alert.opened_at), "times": alert.times,
        },
        "message": alert.message,
    }  # fmt: skip


def _store(
    hook: Webhook, kind: str, said: dict[str, Any], *, run: Any = None, once: str | None = None
) -> WebhookDelivery | None:
    """None if there is a delivery of the same, ``once``, to that address."""
    if once is not None and WebhookDelivery.objects.filter(webhook=hook, once=once).exists():
        return None
    now = timezone.now()
    body = {"type": f"run.{kind}" if run else kind, "timestamp": iso(now), "data": said}
    delivery = WebhookDelivery.objects.create(
        webhook=hook, run=run, kind=kind, body=json.dumps(body, allow_nan=False),
        once=once, created_at=now, next_at=now,
    )  # fmt: skip
    enqueue("deliver_webhook", str(delivery.pk))
    return delivery


# Sending.


def send_again(delivery: WebhookDelivery) -> bool:
    """From the first attempt on; False if it waits anyway."""
    again = WebhookDelivery.objects.filter(pk=delivery.pk).exclude(state=State.WAITING)
    moved = bool(again.update(state=State.WAITING, attempts=0, next_at=timezone.now()))
    if moved:
        enqueue("deliver_webhook", str(delivery.pk))
    return moved


def call_for_due() -> None:
    """Beat's tick: a task for every delivery whose time has come; old ones are forgotten."""
    now = timezone.now()
    WebhookDelivery.objects.filter(created_at__lt=now - KEPT).delete()
    waiting = WebhookDelivery.objects.filter(due("next_at", WAITS[-1], now), state=State.WAITING)
    for pk in waiting.order_by("next_at").values_list("pk", flat=True)[:AT_ONCE]:
        enqueue("deliver_webhook", str(pk))


def deliver(delivery_id: str) -> None:
    """One attempt, if it is due and nobody else is at it."""
    now = timezone.now()
    claimed = WebhookDelivery.objects.filter(
        due("next_at", WAITS[-1], now), pk=delivery_id, state=State.WAITING
    ).update(next_at=now + CLAIM, attempts=F("attempts") + 1, tried_at=now)
    if not claimed:
        return
    delivery = WebhookDelivery.objects.select_related("webhook").get(pk=delivery_id)
    answered = _send(delivery, now)
    over = answered.well or delivery.attempts > len(WAITS) or not delivery.webhook.enabled
    WebhookDelivery.objects.filter(pk=delivery_id, attempts=delivery.attempts).update(
        status=answered.status,
        message=clean_text(answered.said, SHOWN),
        state=State.DELIVERED if answered.well else State.FAILED if over else State.WAITING,
        next_at=now if over else now + WAITS[delivery.attempts - 1],
    )


def _send(delivery: WebhookDelivery, now: datetime) -> Answered:
    hook, body = delivery.webhook, delivery.body.encode()
    if not hook.enabled:
        return Answered(status=None, said="the webhook is switched off")
    try:
        secret = unseal(hook.sealed, name=f"webhook {hook.name}")["SECRET"]
    except NeedsPerson as error:
        return Answered(status=None, said=str(error))
    id, timestamp = str(delivery.pk), int(now.timestamp())
    request = urllib.request.Request(  # noqa: S310 -- http or https: see admin_webhooks
        hook.url,
        method="POST",
        data=body,
        headers={
            "Content-Type": "application/json",
            "User-Agent": "archipelago",
            "webhook-id": id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(secret, id=id, timestamp=timestamp, body=body),
        },
    )
    try:
        with open_url(request, timeout_s=TIMEOUT_S) as response:
            return Answered(status=response.status, said=_text(response))
    except urllib.error.HTTPError as error:
        with error:
            return Answered(status=error.code, said=_text(error))
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        return Answered(status=None, said=f"no answer: {getattr(error, 'reason', None) or error}")


def _text(response: Any) -> str:
    try:
        return str(response.read(SHOWN).decode(errors="replace"))
    except (http.client.HTTPException, OSError) as error:
        return f"the answer broke off: {error!r}"
