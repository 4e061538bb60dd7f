"""Webhooks in the admin."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from runs.alerts import webhooks
from runs.models import Webhook, WebhookDelivery
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db
FORM = {
    "name": "pager",
    "url": "https://example.org/hook",
    "kinds": ["finished"],
    "enabled": "on",
    "secret": "",
}
LIST = "/admin/runs/webhook/"


@pytest.fixture(autouse=True)
def _no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runs.task_queue._send", lambda *_: None)


@pytest.fixture
def admin() -> Client:
    client = Client()
    client.force_login(w.person("root", "admin", superuser=True))
    return client


def test_only_administrators(admin: Client) -> None:
    for role in ("operator", "viewer", ""):
        user = w.person(f"p-{role}", role)
        user.is_staff = True
        user.save()
        client = Client()
        client.force_login(user)
        for path in (LIST, f"{LIST}add/", "/admin/runs/webhookdelivery/"):
            assert client.get(path).status_code == 403
    assert admin.get(LIST).status_code == 200


def test_a_secret_is_generated_shown_once_and_sealed(admin: Client) -> None:
    page = admin.post(f"{LIST}add/", FORM, follow=True).content.decode()
    made = Webhook.objects.get()
    secret = page.split("shown again: ")[1].split("<")[0].strip()
    assert webhooks.unseal(made.sealed, name="x") == {"SECRET": secret}
    assert secret not in admin.get(f"{LIST}{made.pk}/change/").content.decode()
    before = made.sealed
    admin.post(f"{LIST}{made.pk}/change/", FORM | {"name": "other"})
    made.refresh_from_db()
    assert (made.name, made.sealed) == ("other", before)
    own = webhooks.new_secret()
    admin.post(f"{LIST}{made.pk}/change/", FORM | {"secret": own})
    made.refresh_from_db()
    assert webhooks.unseal(made.sealed, name="x") == {"SECRET": own}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"url": "ftp://example.org/"}, "an address with http:// or https://"),
        ({"kinds": ["weather"]}, "Select a valid choice"),
        ({"secret": "short"}, "expected whsec_ and 24 to 64 bytes"),
    ],
)
def test_errors_are_shown(admin: Client, change: dict[str, Any], why: str) -> None:
    assert why in admin.post(f"{LIST}add/", FORM | change).content.decode()
    assert not Webhook.objects.exists()


def test_a_test_is_sent_and_sent_again(admin: Client) -> None:
    admin.post(f"{LIST}add/", FORM)
    pk = Webhook.objects.get().pk
    page = admin.post(LIST, {"action": "test", "_selected_action": [pk]}, follow=True)
    assert "test sent; see its deliveries" in page.content.decode()
    delivery = WebhookDelivery.objects.get()
    assert delivery.kind == "test"
    WebhookDelivery.objects.update(state="failed", attempts=8, message="500")
    deliveries = "/admin/runs/webhookdelivery/"
    assert "500" in admin.get(deliveries).content.decode()
    data = {"action": "send_again", "_selected_action": [str(delivery.pk)]}
    assert "1 sent again" in admin.post(deliveries, data, follow=True).content.decode()
    delivery.refresh_from_db()
    assert (delivery.state, delivery.attempts) == ("waiting", 0)
    assert admin.get(f"{deliveries}{delivery.pk}/change/").status_code == 200
    assert admin.post(f"{deliveries}{delivery.pk}/delete/").status_code == 403
