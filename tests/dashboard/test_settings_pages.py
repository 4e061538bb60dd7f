"""The pages of ``/settings``: what each role sees, and what administrators change."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from runs.models import (
    Budget,
    Credential,
    ExperimentTracker,
    PriceOverride,
    RunMirror,
    TrafficPrice,
    Webhook,
    WebhookDelivery,
)
from tests.browser import seed, seed_fleet
from tests.dashboard.page_harness import errors_at, messages_of

pytestmark = pytest.mark.django_db

FOR_ALL = ("settings-budgets", "settings-prices", "settings-backends", "tokens", "password")
FOR_ADMINISTRATORS = ("settings-credentials", "settings-webhooks", "settings-trackers", "users")


@pytest.fixture(autouse=True)
def _prices() -> Any:
    from runs.backends import price_settings

    yield
    price_settings._copy = price_settings._Copy()


@pytest.fixture
def admin(client: Client) -> Any:
    user = seed.user("root", "admin")
    client.force_login(user)
    return user


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_each_role_sees_its_pages(client: Client, role: str) -> None:
    client.force_login(seed.user("vera", role))
    seed_fleet.mixed(seed.user("olga", "operator"))
    for name in FOR_ALL:
        assert client.get(reverse(name)).status_code == 200, name
    wanted = 200 if role == "admin" else 403
    for name in FOR_ADMINISTRATORS:
        assert client.get(reverse(name)).status_code == wanted, name
    assert client.get(reverse("settings")).status_code == 302


@pytest.mark.parametrize(
    "name",
    ["users", "settings-budgets", "settings-webhooks", "backend-reset"],
)
def test_an_operator_changes_no_setting(client: Client, name: str) -> None:
    client.force_login(seed.user("olga", "operator"))
    assert client.post(reverse(name), {"backend": "modal"}).status_code == 403


def test_the_budget_form_suggests_owners_and_tags(client: Client, admin: Any) -> None:
    run = seed.run(seed.user("olga", "operator"), committed=0, replicas=1)
    type(run).objects.update(tags=["paper"])
    page = client.get(reverse("settings-budgets"))
    assert page.context["names"] == ["olga", "paper"]
    assert '<option value="paper">' in page.content.decode()
    assert 'value="80"' in page.content.decode()
    client.force_login(run.owner)
    assert client.get(reverse("settings-budgets")).context["names"] == ()


def test_budgets_are_added_changed_and_deleted(client: Client, admin: Any) -> None:
    seed.user("olga", "operator")
    fields = {
        "scope": "owner",
        "name": "olga",
        "period": "week",
        "amount_usd": "500",
        "warn_percent": "90",
    }
    assert client.post(reverse("settings-budgets"), fields).status_code == 302
    budget = Budget.objects.get()
    assert (budget.amount_usd, budget.warn_at, budget.created_by) == (500, 0.9, admin)
    page = client.get(reverse("settings-budgets")).content.decode()
    assert "olga" in page and "$500" in page
    again = client.post(reverse("settings-budgets"), fields)
    assert again.status_code == 422
    assert "Expected no other budget of owner olga" in again.content.decode()
    change = reverse("settings-budget", args=[budget.pk])
    assert client.post(change, {**fields, "amount_usd": "800"}).status_code == 302
    assert Budget.objects.get().amount_usd == 800
    client.post(reverse("budget-delete", args=[budget.pk]))
    assert not Budget.objects.exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "nora", "Expected the name of a user, found &#x27;nora&#x27;"),
        ("amount_usd", "inf", "Enter a number."),
        ("amount_usd", "-1", "greater than or equal to 0"),
        ("warn_percent", "0", "greater than or equal to 1"),
    ],
)
def test_a_bad_budget_shows_the_error_and_stores_nothing(
    client: Client, admin: Any, field: str, value: str, message: str
) -> None:
    fields = {
        "scope": "owner",
        "name": "root",
        "period": "day",
        "amount_usd": "5",
        "warn_percent": "80",
    }
    response = client.post(reverse("settings-budgets"), {**fields, field: value})
    assert response.status_code == 422
    assert message in response.content.decode()
    assert not Budget.objects.exists()


def test_a_price_is_set_and_used_at_once(client: Client, admin: Any) -> None:
    from runs.backends.executors import catalogue

    listed = catalogue().get("modal", "H100")
    address = reverse("settings-price", args=["modal", "H100"])
    assert client.post(address, {"price_usd_h": "1.25", "spot_price_usd_h": ""}).status_code == 302
    found = catalogue().get("modal", "H100")
    assert listed and found
    assert (found.price_usd_h, found.spot_price_usd_h) == (1.25, listed.spot_price_usd_h)
    assert (
        "set here" in client.get(reverse("settings-prices"), {"backend": "modal"}).content.decode()
    )
    client.post(address, {"price_usd_h": "", "spot_price_usd_h": ""})
    assert not PriceOverride.objects.exists()
    assert catalogue().get("modal", "H100") == listed
    assert client.get(reverse("settings-price", args=["modal", "X1"])).status_code == 404


def test_prices_of_traffic_are_set_and_removed(client: Client, admin: Any) -> None:
    address = reverse("settings-traffic", args=["s3"])
    wrong = client.post(address, {"upload_usd_gb": "x"})
    assert wrong.status_code == 422
    prices = {"upload_usd_gb": "0.05", "download_usd_gb": "0.09", "requests_usd_million": "0.4"}
    assert client.post(address, prices).status_code == 302
    assert TrafficPrice.objects.get().download_usd_gb == 0.09
    client.post(address, {"remove": "1"})
    assert not TrafficPrice.objects.exists()
    assert client.get(reverse("settings-traffic", args=["ftp"])).status_code == 404


def test_webhooks_are_added_tested_and_deleted(client: Client, admin: Any) -> None:
    fields = {"name": "Chat", "url": "http://127.0.0.1/x", "kinds": ["finished"], "enabled": "on"}
    page = client.post(reverse("settings-webhooks"), fields)
    hook = Webhook.objects.get()
    shown = 'value="whsec_'
    assert shown in page.content.decode()
    assert shown not in client.get(reverse("settings-webhooks")).content.decode()
    client.post(reverse("webhook-test", args=[hook.pk]))
    delivery = WebhookDelivery.objects.get()
    assert "test" in client.get(reverse("settings-webhook", args=[hook.pk])).content.decode()
    WebhookDelivery.objects.update(state="failed")
    client.post(reverse("delivery-repeat", args=[delivery.pk]))
    assert WebhookDelivery.objects.get().state == "waiting"
    change = {**fields, "name": "Talk", "enabled": ""}
    client.post(reverse("settings-webhook", args=[hook.pk]), change)
    changed = Webhook.objects.get()
    assert (changed.name, changed.enabled, changed.sealed) == ("Talk", False, hook.sealed)
    client.post(reverse("webhook-delete", args=[hook.pk]))
    assert not Webhook.objects.exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("url", "http://169.254.169.254/", "169.254.169.254"),
        ("url", "ftp://example.org", "Expected an address with http"),
        ("secret", "whsec_short", "bytes in base64"),
        ("kinds", [], "Select at least one kind of alert."),
    ],
)
def test_a_bad_webhook_shows_the_error(
    client: Client, admin: Any, field: str, value: Any, message: str
) -> None:
    fields = {"name": "Chat", "url": "http://127.0.0.1/x", "kinds": ["finished"], "enabled": "on"}
    response = client.post(reverse("settings-webhooks"), {**fields, field: value})
    assert response.status_code == 422
    assert message in response.content.decode()
    assert not Webhook.objects.exists()


def test_credentials_are_added_rotated_and_deleted(client: Client, admin: Any) -> None:
    address = reverse("credential-new", args=["modal"])
    assert "MODAL_TOKEN_SECRET" in client.get(address).content.decode()
    empty = client.post(address, {"name": "prod"})
    assert empty.status_code == 422
    assert "This field is required." in empty.content.decode()
    secret = "as-topsecret-1"
    fields = {
        "name": "prod",
        "variable_MODAL_TOKEN_ID": "ak-1",
        "variable_MODAL_TOKEN_SECRET": secret,
    }
    assert client.post(address, fields).status_code == 302
    credential = Credential.objects.get()
    assert credential.fields == ["MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"]
    page = reverse("settings-credential", args=[credential.pk])
    assert secret not in client.get(page).content.decode()
    client.post(page, {"name": "prod", "variable_MODAL_TOKEN_SECRET": "as-other-2"})
    assert Credential.objects.get().sealed != credential.sealed
    run = seed.run(seed.user("olga", "operator"), replicas=1, committed=1)
    run.pools.update(credential=credential)
    refused = client.post(reverse("credential-delete", args=[credential.pk]), follow=True)
    assert "is used by" in messages_of(refused)
    run.pools.update(credential=None)
    client.post(reverse("credential-delete", args=[credential.pk]))
    assert not Credential.objects.exists()
    assert client.get(reverse("credential-new", args=["nothing"])).status_code == 404


def test_the_breakers_of_a_backend_are_reset(client: Client, admin: Any) -> None:
    run = seed_fleet.mixed(seed.user("olga", "operator"))
    run.pools.filter(backend="modal").update(requires_intervention=True, last_error="quota")
    page = client.get(reverse("settings-backends")).content.decode()
    assert "quota" in page and "Action required" in page
    client.post(reverse("backend-reset"), {"backend": "modal", "credential": ""})
    assert not run.pools.filter(requires_intervention=True).exists()
    assert run.events.filter(kind="breaker", actor=admin).exists()
    assert client.post(reverse("backend-reset"), {"backend": "none"}).status_code == 404


def test_old_addresses_lead_to_the_settings(client: Client, admin: Any) -> None:
    for old, new in (("/users/?q=o", "users"), ("/account/tokens", "tokens")):
        assert client.get(old)["Location"].startswith(reverse(new))


def test_trackers_are_added_changed_and_deleted(client: Client, admin: Any) -> None:
    new = reverse("tracker-new", args=["mlflow"])
    values = {"name": "board", "server": "mlflow.example", "project": "islands", "enabled": "on"}
    response = client.post(new, values | {"MLFLOW_TRACKING_TOKEN": "t-123"})
    assert response.status_code == 422
    page = response.content.decode()
    assert "Expected an address such as" in errors_at(page, "server")
    assert 'value="mlflow.example"' in page and 'value="islands"' in page
    assert "t-123" not in page
    values["server"] = "https://mlflow.example"
    assert client.post(new, values | {"MLFLOW_TRACKING_TOKEN": "t-123"}).status_code == 302
    tracker = ExperimentTracker.objects.get()
    assert (tracker.kind, tracker.project, tracker.created_by) == ("mlflow", "islands", admin)
    place = reverse("settings-tracker", args=[tracker.pk])
    assert "t-123" not in client.get(place).content.decode()
    moved = values | {"server": "https://elsewhere.example"}
    response = client.post(place, moved)
    assert response.status_code == 422
    page = response.content.decode()
    assert "enter MLFLOW_TRACKING_TOKEN again" in errors_at(page, "MLFLOW_TRACKING_TOKEN")
    assert 'value="https://elsewhere.example"' in page
    del values["enabled"]
    assert client.post(place, values).status_code == 302
    assert "off" in client.get(reverse("settings-trackers")).content.decode()
    client.post(reverse("tracker-delete", args=[tracker.pk]))
    assert not ExperimentTracker.objects.exists()
    assert client.get(reverse("tracker-new", args=["neptune"])).status_code == 404


@pytest.mark.parametrize(
    ("kind", "changed", "field", "message"),
    [
        ("mlflow", {"server": "http://["}, "server", "Invalid IPv6 URL"),
        ("mlflow", {"server": "http://a:99999"}, "server", "Port out of range"),
        ("mlflow", {"server": "https://u:p@a.example"}, "server", "an address without secrets"),
        ("mlflow", {"server": "https://10.0.0.1"}, "server", "Expected a public address"),
        ("mlflow", {"server": ""}, "server", "Enter a value"),
        ("mlflow", {"server": "x" * 501}, "server", "at most 500 characters"),
        ("mlflow", {"project": " "}, "project", "Enter a value"),
        ("mlflow", {"name": "taken"}, "name", "Expected an unused name, found"),
        ("tensorboard", {"server": "logs"}, "server", "Expected an absolute path"),
    ],
)
def test_a_refused_value_of_a_tracker_is_shown_at_its_field(
    client: Client, admin: Any, settings: Any, kind: str, changed: dict[str, str], field: str,
    message: str,
) -> None:  # fmt: skip
    settings.ALLOWED_ADDRESSES = []
    ExperimentTracker.objects.create(name="taken", kind="mlflow", created_at=timezone.now())
    values = {"name": "new", "server": "https://1.1.1.1", "project": "islands"} | changed
    response = client.post(reverse("tracker-new", args=[kind]), values)
    page = response.content.decode()
    assert response.status_code == 422
    assert message in errors_at(page, field)
    assert f'aria-describedby="id_{field}_' in page and 'role="alert"' not in page


def test_a_run_is_mirrored_from_its_settings_tab(client: Client, admin: Any) -> None:
    run = seed.run(seed.user("olga", "operator"), committed=1, replicas=1)
    values = {"name": "board", "server": "/srv/logs", "enabled": "on"}
    client.post(reverse("tracker-new", args=["tensorboard"]), values)
    page = reverse("run", args=[run.pk]) + "?tab=settings"
    assert "Mirror to this tracker" in client.get(page).content.decode()
    client.post(reverse("run-mirror", args=[run.pk]), {"tracker": "board\0"})
    assert not RunMirror.objects.exists()
    client.post(reverse("run-mirror", args=[run.pk]), {"tracker": "board"})
    mirror = RunMirror.objects.get()
    assert (mirror.run, mirror.state) == (run, RunMirror.State.ACTIVE)
    assert "Mirror to this tracker" not in client.get(page).content.decode()
    client.post(reverse("run-mirror", args=[run.pk]), {"tracker": "board", "stop": "1"})
    mirror.refresh_from_db()
    assert mirror.state == RunMirror.State.STOPPED
    response = client.post(reverse("run-mirror", args=[run.pk]), {"tracker": "bord"}, follow=True)
    assert "expected a tracker (board)" in messages_of(response)
