"""Webhooks against a real HTTP server: messages, signatures and retries."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.core.management import call_command
from django.utils import timezone

from runs import live_stream, tasks
from runs.alerts import store as alerting
from runs.alerts import webhooks
from runs.alerts.rules import Finding, RuleResult
from runs.alerts.webhooks import BadSecret
from runs.backends import shared_breakers
from runs.models import Webhook, WebhookDelivery
from tests.browser import seed
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db
SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()


class Receiver:
    """Responds as configured, and records requests."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.headers: dict[str, str] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
                self.send_response(outer.statuses.pop(0) if outer.statuses else 200)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b"heard \x00 it")

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Tasks that :mod:`runs.alerts.webhooks` enqueued."""
    result: list[tuple[Any, ...]] = []
    monkeypatch.setattr("runs.alerts.webhooks.enqueue", lambda *args: result.append(args))
    monkeypatch.setenv("no_proxy", "*")
    return result


def hook(url: str, **fields: Any) -> Webhook:
    return Webhook.objects.create(
        **{
            "name": "pager",
            "url": url,
            "kinds": ["finished", "stalled"],
            "sealed": webhooks.sealed_secret(SECRET),
            "created_at": timezone.now(),
            **fields,
        }
    )


@pytest.fixture
def run() -> Any:
    return seed.run(seed.user("owner", "operator"), state="failed", reason="all died", committed=2)


def end(run: Any, kind: str = "finished", subject: str = "") -> None:
    finding = Finding(kind=kind, level="error", subject=subject, message="all died")
    now = timezone.now()
    for alert in alerting.sync(run, RuleResult(findings=(finding,)), {}, now=now):
        alerting.notify(alert)


def test_run_selects_its_webhooks(run: Any, receiver: Receiver) -> None:
    pager, chat = hook(receiver.url), hook(receiver.url, name="chat")
    for selected, names in ((None, {"pager", "chat"}), ([chat.pk], {"chat"}), ([], set())):
        run.notify = selected
        WebhookDelivery.objects.all().delete()
        run.alerts.all().delete()
        end(run)
        assert {d.webhook.name for d in WebhookDelivery.objects.all()} == names
    run.notify = [pager.pk]
    pager.delete()  # a deleted webhook gets no delivery, and no other one instead
    run.alerts.all().delete()
    end(run)
    assert not WebhookDelivery.objects.exists()


def test_message_and_signature(run: Any, receiver: Receiver, sent: Any) -> None:
    hook(receiver.url)
    end(run)
    (delivery,) = WebhookDelivery.objects.all()
    assert sent == [("deliver_webhook", str(delivery.pk))]
    webhooks.deliver(str(delivery.pk))
    ((headers, body),) = receiver.requests
    message = json.loads(body)
    assert message["type"] == "run.finished"
    assert message["data"]["run"]["id"] == str(run.pk)
    assert message["data"]["run"]["state"] == "failed"
    assert message["data"]["alert"]["level"] == "error"
    assert message["data"]["message"] == "all died"
    # Verify like a receiver.
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.new(b"k" * 32, signed, hashlib.sha256).digest()
    assert headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
    assert headers["webhook-id"] == str(delivery.pk)
    assert abs(int(headers["webhook-timestamp"]) - timezone.now().timestamp()) < 60
    delivery.refresh_from_db()
    assert (delivery.state, delivery.attempts, delivery.status) == ("delivered", 1, 200)
    assert delivery.message == "heard � it"


def test_only_subscribed_webhooks_get_a_delivery(run: Any, receiver: Receiver) -> None:
    hook(receiver.url, name="off", enabled=False)
    hook(receiver.url, name="other", kinds=["nan"])
    end(run)
    assert not WebhookDelivery.objects.exists()
    end(run, kind="nan", subject="replica 1")
    assert WebhookDelivery.objects.get().webhook.name == "other"


def test_retries_with_growing_delays_until_failure(
    run: Any, receiver: Receiver, clock: w.Clock
) -> None:
    hook(receiver.url)
    end(run)
    pk = str(WebhookDelivery.objects.get().pk)
    receiver.statuses = [500, 404, 302, 503, 500, 429, 500, 500]
    receiver.headers = {"Location": "http://127.0.0.1:1/elsewhere"}
    for wait in webhooks.WAITS:
        webhooks.deliver(pk)
        delivery = WebhookDelivery.objects.get()
        assert delivery.state == "waiting"
        assert delivery.next_at == clock() + wait
        webhooks.deliver(pk)  # not due, so nothing is sent
        clock.pass_s(wait.total_seconds())
    webhooks.deliver(pk)
    delivery = WebhookDelivery.objects.get()
    assert (delivery.state, delivery.attempts, delivery.status) == ("failed", 8, 500)
    assert len(receiver.requests) == 8
    assert len({body for _, body in receiver.requests}) == 1


def test_an_unreachable_receiver_is_retried(run: Any, clock: w.Clock) -> None:
    hook("http://127.0.0.1:1/")
    end(run)
    webhooks.deliver(str(WebhookDelivery.objects.get().pk))
    delivery = WebhookDelivery.objects.get()
    assert (delivery.state, delivery.status) == ("waiting", None)
    assert delivery.message.startswith("no answer: ")


def test_a_receiver_that_sends_a_byte_now_and_then_is_given_up(
    run: Any, clock: w.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deliveries would occupy workers for ever, because no attempt would ever be counted."""
    assert tasks.deliver_webhook.soft_time_limit < webhooks.CLAIM.total_seconds()

    def slow(*_: Any, **__: Any) -> Any:
        raise SoftTimeLimitExceeded(webhooks.ATTEMPT_S)

    monkeypatch.setattr(webhooks, "open_url", slow)
    hook("http://127.0.0.1:1/")
    end(run)
    webhooks.deliver(str(WebhookDelivery.objects.get().pk))
    delivery = WebhookDelivery.objects.get()
    assert (delivery.state, delivery.message) == ("waiting", "no whole answer within 20 s")
    assert delivery.next_at == clock() + webhooks.WAITS[0]


def test_receivers_that_hang_leave_workers_for_launches(
    run: Any, valkey: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.REDIS_URL = valkey
    live_stream.client().flushall()
    seconds = [1000.0]
    monkeypatch.setattr("runs.backends.shared_breakers.time.time", lambda: seconds[0])
    for number in range(3):
        hook("http://127.0.0.1:1/", name=f"hook {number}")
    end(run)
    begun: list[int] = []
    working = [0]

    def deliver_all() -> None:
        for pk in WebhookDelivery.objects.values_list("pk", flat=True):
            tasks.deliver_webhook(str(pk))

    def hang(request: Any) -> webhooks.Response:
        working[0] += 1
        begun.append(working[0])
        seconds[0] += shared_breakers.QUICK_S
        deliver_all()  # other workers, meanwhile
        working[0] -= 1
        return webhooks.Response(status=None, text="no answer")

    monkeypatch.setattr(webhooks, "_send", hang)
    deliver_all()
    assert (len(begun), max(begun)) == (3, 2)
    end(run, kind="stalled")  # receivers that did not answer a moment ago are not asked
    deliver_all()
    assert len(begun) == 3
    monkeypatch.setattr(webhooks, "_send", lambda *_: webhooks.Response(status=500, text=""))
    seconds[0] += shared_breakers.OPEN_CAP_S
    deliver_all()
    assert set(WebhookDelivery.objects.filter(kind="stalled").values_list("status")) == {(500,)}


def test_two_workers_send_once_and_the_claim_of_a_dead_one_expires(
    run: Any, receiver: Receiver, clock: w.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook(receiver.url)
    end(run)
    pk = str(WebhookDelivery.objects.get().pk)

    class Died(Exception):
        pass

    def dies(*_: Any) -> Any:
        webhooks.deliver(pk)  # another worker, meanwhile
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(webhooks, "_send", dies)
        with pytest.raises(Died):
            webhooks.deliver(pk)
    assert receiver.requests == []
    webhooks.deliver(pk)
    assert receiver.requests == []
    clock.pass_s(webhooks.CLAIM.total_seconds())
    webhooks.deliver(pk)
    assert len(receiver.requests) == 1
    assert WebhookDelivery.objects.get().attempts == 2


def test_webhook_disabled_meanwhile(run: Any, receiver: Receiver) -> None:
    made = hook(receiver.url)
    end(run)
    Webhook.objects.filter(pk=made.pk).update(enabled=False)
    webhooks.deliver(str(WebhookDelivery.objects.get().pk))
    delivery = WebhookDelivery.objects.get()
    assert (delivery.state, delivery.message) == ("failed", "the webhook is switched off")
    assert receiver.requests == []


def test_repeated_delivery_has_the_same_body(run: Any, receiver: Receiver) -> None:
    hook(receiver.url)
    end(run)
    delivery = WebhookDelivery.objects.get()
    assert not webhooks.send_again(delivery)
    webhooks.deliver(str(delivery.pk))
    assert webhooks.send_again(delivery)
    webhooks.deliver(str(delivery.pk))
    (_, first), (_, second) = receiver.requests
    assert first == second
    assert {headers["webhook-id"] for headers, _ in receiver.requests} == {str(delivery.pk)}


def test_due_deliveries_are_enqueued_and_old_ones_deleted(
    run: Any, receiver: Receiver, clock: w.Clock, sent: Any
) -> None:
    made = hook(receiver.url)
    old = webhooks.send_test(made, actor="olga")
    clock.pass_s(webhooks.KEPT.total_seconds())
    new = webhooks.send_test(made, actor="olga")
    later = webhooks.send_test(made, actor="olga")
    WebhookDelivery.objects.filter(pk=later.pk).update(next_at=clock() + timedelta(seconds=5))
    clock.pass_s(1)
    sent.clear()
    webhooks.call_for_due()
    assert sent == [("deliver_webhook", str(new.pk))]
    assert not WebhookDelivery.objects.filter(pk=old.pk).exists()


def test_a_run_that_is_deleted_leaves_its_deliveries(run: Any, receiver: Receiver) -> None:
    hook(receiver.url)
    end(run)
    run.delete()
    webhooks.deliver(str(WebhookDelivery.objects.get().pk))
    assert WebhookDelivery.objects.get().state == "delivered"


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "whsec_",
        "whsec_%%%",
        "whsec_" + base64.b64encode(b"k" * 23).decode(),
        base64.b64encode(b"k" * 32).decode(),
    ],
)
def test_invalid_secrets(secret: str) -> None:
    with pytest.raises(BadSecret, match="expected whsec_ and 24 to 64 bytes in base64, found"):
        webhooks.key_of(secret)


def test_the_secret_is_sealed_and_follows_the_key(receiver: Receiver, settings: Any) -> None:
    from cryptography.fernet import Fernet

    made = hook(receiver.url)
    assert SECRET not in made.sealed
    assert webhooks.key_of(webhooks.new_secret())
    old = settings.CREDENTIALS_KEYS
    settings.CREDENTIALS_KEYS = (Fernet.generate_key().decode(), *old)
    call_command("reseal_credentials")
    settings.CREDENTIALS_KEYS = settings.CREDENTIALS_KEYS[:1]
    webhooks.deliver(str(webhooks.send_test(made, actor="olga").pk))
    assert len(receiver.requests) == 1
    settings.CREDENTIALS_KEYS = old  # without the new key
    webhooks.deliver(str(webhooks.send_test(made, actor="olga").pk))
    assert len(receiver.requests) == 1
    assert "sealed with another key" in WebhookDelivery.objects.first().message


def test_tick_notifies_about_the_end(make_harness: Any, receiver: Receiver) -> None:
    harness = make_harness(replicas=1)
    hook(receiver.url)
    harness.start()
    harness.bucket.final(4)
    harness.beat_all("done")
    harness.tick()
    for _ in range(5):
        if not WebhookDelivery.objects.exists():
            harness.tick()
    (delivery,) = WebhookDelivery.objects.all()
    webhooks.deliver(str(delivery.pk))
    assert json.loads(receiver.requests[0][1])["data"]["run"]["state"] == harness.run.state
