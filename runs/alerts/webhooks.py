"""Deliver alerts to webhooks: signed, with retries, and with a history.

A delivery is stored first, and a worker sends it later, outside any transaction. The worker claims
it with a conditional UPDATE, so that two workers do not send it at once; the claim of a dead worker
expires. A delivery without a 2xx response is retried after each of :data:`WAITS`. A receiver can
therefore get a message twice, and detects that by the ID.

Messages are signed according to https://www.standardwebhooks.com, whose libraries verify them. The
headers are ``webhook-id``, ``webhook-timestamp`` and ``webhook-signature``: ``v1,`` and the base64
of HMAC-SHA256 over ``id.timestamp.body``. The key is the part of the secret after ``whsec_``.
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

from celery.exceptions import SoftTimeLimitExceeded
from django.db.models import F
from django.utils import timezone

from executors.base import AccountError
from runs.alerts.rules import KINDS
from runs.credentials.vault import seal, unseal
from runs.json_values import iso
from runs.models import Alert, Run, Webhook, WebhookDelivery
from runs.outbound import open_url
from runs.redaction import clean_text
from runs.task_queue import enqueue
from runs.times import due

State = WebhookDelivery.State

TEST = "test"
PREFIX = "whsec_"
SHORTEST_KEY, LONGEST_KEY = 24, 64
TIMEOUT_S = 10.0
ATTEMPT_S = 20
"""Time limit of the task of an attempt: a receiver that sends a byte now and then never exceeds
:data:`TIMEOUT_S`. Below :data:`CLAIM`, after which another worker sends it again."""
CLAIM = timedelta(seconds=60)
"""Time that a worker has to send a claimed delivery."""
WAITS = tuple(timedelta(seconds=s) for s in (10, 60, 300, 1800, 7200, 21_600, 43_200))
"""Delays after the first attempt, the second and so on: about a day in total."""
KEPT = timedelta(days=30)
AT_ONCE = 200
SHOWN = 500
"""Characters of a response that are stored."""


class BadSecret(ValueError):
    """The text is no valid signing secret."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """Result of one attempt. ``status`` is None without a response; ``text`` is then the error."""

    status: int | None
    text: str

    @property
    def is_success(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


# Secrets.


def new_secret() -> str:
    """Generate a signing secret."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def sealed_secret(text: str) -> str:
    """Encrypt a secret for storage. Raises :class:`BadSecret`."""
    key_of(text)
    return seal({"SECRET": text})


def key_of(secret: str) -> bytes:
    """Decode the key of a secret. Raises :class:`BadSecret`."""
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
    """Value of the header ``webhook-signature``."""
    signed = f"{id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key_of(secret), signed, hashlib.sha256)).decode()


# Messages.


def announce(alert: Alert) -> list[WebhookDelivery]:
    """Create deliveries to the webhooks that are subscribed to the alert's kind and run."""
    selected = alert.run.notify if alert.run else None
    hooks = [
        hook
        for hook in Webhook.objects.filter(enabled=True)
        if alert.kind in hook.kinds and (selected is None or hook.pk in selected)
    ]
    once = f"alert {alert.pk} {alert.times}"
    stored = [_store(hook, alert.kind, _data(alert), run=alert.run, once=once) for hook in hooks]
    return [delivery for delivery in stored if delivery is not None]


def send_test(hook: Webhook, *, actor: str) -> WebhookDelivery:
    """Create a delivery with a test message."""
    delivery = _store(hook, TEST, {"message": f"a test, sent by {actor}"})
    assert delivery is not None
    return delivery


def _data(alert: Alert) -> dict[str, Any]:
    return {
        "run": _run_data(alert.run) if alert.run else None,
        "alert": {
            "kind": alert.kind,
            "title": KINDS.get(alert.kind, alert.kind),
            "level": alert.level,
            "subject": alert.subject,
            "opened_at": iso(alert.opened_at),
            "times": alert.times,
        },
        "message": alert.message,
    }


def _run_data(run: Run) -> dict[str, Any]:
    return {
        "id": str(run.pk),
        "name": run.name,
        "owner": run.owner.get_username(),
        "state": str(run.state),
        "state_reason": run.state_reason,
        "committed_rounds": run.committed_rounds,
        "total_rounds": run.total_rounds,
        "tokens": run.tokens,
        "cost_usd": run.cost_usd,
    }


def _store(
    hook: Webhook, kind: str, data: dict[str, Any], *, run: Any = None, once: str | None = None
) -> WebhookDelivery | None:
    """Store and enqueue a delivery; None if one with the key ``once`` exists for the webhook."""
    if once is not None and WebhookDelivery.objects.filter(webhook=hook, once=once).exists():
        return None
    now = timezone.now()
    body = {"type": f"run.{kind}" if run else kind, "timestamp": iso(now), "data": data}
    delivery = WebhookDelivery.objects.create(
        webhook=hook,
        run=run,
        kind=kind,
        body=json.dumps(body, allow_nan=False),
        once=once,
        created_at=now,
        next_at=now,
    )
    enqueue("deliver_webhook", str(delivery.pk))
    return delivery


# Sending.


def send_again(delivery: WebhookDelivery) -> bool:
    """Repeat a finished delivery, with all attempts; False if it is still waiting."""
    finished = WebhookDelivery.objects.filter(pk=delivery.pk).exclude(state=State.WAITING)
    changed = bool(finished.update(state=State.WAITING, attempts=0, next_at=timezone.now()))
    if changed:
        enqueue("deliver_webhook", str(delivery.pk))
    return changed


def call_for_due() -> None:
    """Enqueue a task for every due delivery, and delete old deliveries."""
    now = timezone.now()
    WebhookDelivery.objects.filter(created_at__lt=now - KEPT).delete()
    waiting = WebhookDelivery.objects.filter(due("next_at", WAITS[-1], now), state=State.WAITING)
    for pk in waiting.order_by("next_at").values_list("pk", flat=True)[:AT_ONCE]:
        enqueue("deliver_webhook", str(pk))


def place_of(delivery_id: str) -> str | None:
    """The receiver of a delivery, as a place of :mod:`runs.backends.shared_breakers`; None if the
    delivery was deleted."""
    ids = WebhookDelivery.objects.filter(pk=delivery_id).values_list("webhook", flat=True)
    return next((f"webhook:{pk}" for pk in ids), None)


def deliver(delivery_id: str) -> Response | None:
    """Make one attempt, if the delivery is due and no other worker has claimed it, and return its
    result; None if nothing was sent."""
    now = timezone.now()
    claimed = WebhookDelivery.objects.filter(
        due("next_at", WAITS[-1], now), pk=delivery_id, state=State.WAITING
    ).update(next_at=now + CLAIM, attempts=F("attempts") + 1, tried_at=now)
    if not claimed:
        return None
    delivery = WebhookDelivery.objects.select_related("webhook").get(pk=delivery_id)
    request = _request(delivery, now)
    response = request if isinstance(request, Response) else _send(request)
    finished = response.is_success or delivery.attempts > len(WAITS) or not delivery.webhook.enabled
    failed = State.FAILED if finished else State.WAITING
    WebhookDelivery.objects.filter(pk=delivery_id, attempts=delivery.attempts).update(
        status=response.status,
        message=clean_text(response.text, SHOWN),
        state=State.DELIVERED if response.is_success else failed,
        next_at=now if finished else now + WAITS[delivery.attempts - 1],
    )
    return None if response is request else response


def _request(delivery: WebhookDelivery, now: datetime) -> urllib.request.Request | Response:
    """The signed request; the result without one if it cannot be made."""
    hook, body = delivery.webhook, delivery.body.encode()
    if not hook.enabled:
        return Response(status=None, text="the webhook is switched off")
    try:
        secret = unseal(hook.sealed, name=f"webhook {hook.name}")["SECRET"]
    except AccountError as error:
        return Response(status=None, text=str(error))
    id, timestamp = str(delivery.pk), int(now.timestamp())
    return urllib.request.Request(  # noqa: S310 -- the admin form accepts http and https only
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


def _send(request: urllib.request.Request) -> Response:
    try:
        with open_url(request, timeout_s=TIMEOUT_S) as response:
            return Response(status=response.status, text=_text(response))
    except urllib.error.HTTPError as error:
        with error:
            return Response(status=error.code, text=_text(error))
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        return Response(status=None, text=f"no answer: {getattr(error, 'reason', None) or error}")
    except SoftTimeLimitExceeded:
        return Response(status=None, text=f"no whole answer within {ATTEMPT_S} s")


def _text(response: Any) -> str:
    try:
        return str(response.read(SHOWN).decode(errors="replace"))
    except (http.client.HTTPException, OSError) as error:
        return f"the response was incomplete: {error!r}"
