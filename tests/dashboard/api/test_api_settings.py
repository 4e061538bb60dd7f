"""Alerts, search and settings through the API."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from runs.models import Alert, ApiToken, Budget, Credential, PriceOverride, TrafficPrice, Webhook
from tests.browser import seed, seed_fleet

pytestmark = pytest.mark.django_db

ALL_SCOPES = ("read", "operate", "admin")
BUDGET = {"scope": "owner", "name": "owner", "period": "week", "amount_usd": 100.0}
HOOK = {"name": "Chat", "url": "http://127.0.0.1/x"}
MODAL = {
    "name": "prod",
    "kind": "modal",
    "secrets": {"MODAL_TOKEN_ID": "ak-1", "MODAL_TOKEN_SECRET": "as-topsecret"},
}


@pytest.fixture(autouse=True)
def _prices(monkeypatch: pytest.MonkeyPatch) -> Any:
    from runs.backends import price_settings

    monkeypatch.setattr("runs.task_queue._send", lambda *_: None)
    yield
    price_settings._copy = price_settings._Copy()


class Caller:
    """Calls with any method."""

    def __init__(self, program: Any) -> None:
        self.program = program

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        call = getattr(self.program.client, method)
        options = {} if body is None else {"data": body, "content_type": "application/json"}
        return call(f"/api{path}", headers=self.program.headers, **options)


@pytest.fixture
def root(program: Any, token_of: Callable[..., str]) -> Caller:
    return Caller(program(token_of("root", "admin", *ALL_SCOPES)))


def test_alerts_of_all_runs(run: Any, owner: Any) -> None:
    now = timezone.now()
    Alert.objects.create(
        run=run, kind="stalled", level="error", message="m", first_at=now, opened_at=now
    )
    type(run.owner).objects.update(date_joined=now - timedelta(days=1))
    inbox = owner.get("/alerts", firing="true").json()
    assert (inbox["unread"], inbox["firing"], len(inbox["alerts"])) == (1, 1, 1)
    assert inbox["alerts"][0]["run_name"] == run.name
    assert inbox["kinds"] == [{"kind": "stalled", "title": "Stalled", "count": 1}]
    assert owner.post("/alerts/read", {"until": inbox["alerts"][0]["opened_at"]}).status_code == 200
    assert owner.post("/alerts/read").json() == {"unread": 0}
    assert owner.get("/alerts", before="x").status_code == 422
    assert owner.post("/alerts/read", {"until": "yesterday"}).status_code == 422


def test_search(run: Any, owner: Any) -> None:
    found = owner.get("/search", q=f"stop {run.name}").json()["found"]
    assert found[0]["kind"] == "action" and found[0]["label"] == f"Stop {run.name}"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("get", "/credentials", None),
        ("post", "/credentials", MODAL),
        ("get", "/webhooks", None),
        ("post", "/webhooks", HOOK),
        ("post", "/budgets", BUDGET),
        ("put", "/prices/hardware/modal/H100", {"price_usd_h": 1.0}),
        ("get", "/users", None),
        ("post", "/users", {"name": "new"}),
        ("post", "/backends/reset", {"backend": "modal"}),
    ],
)
def test_settings_need_an_administrator_and_the_scope(
    method: str, path: str, body: Any, program: Any, token_of: Callable[..., str]
) -> None:
    operator = Caller(program(token_of("olga", "operator", *ALL_SCOPES)))
    assert operator(method, path, body).status_code == 403
    without_scope = Caller(program(token_of("root", "admin", "operate")))
    response = without_scope(method, path, body)
    assert (response.status_code, response.json()["detail"]) == (
        403,
        "expected the scope admin, found operate, read",
    )


def test_budgets(root: Caller, owner: Any) -> None:
    made = root("post", "/budgets", BUDGET)
    assert made.status_code == 201, made.content
    assert (made.json()["state"], made.json()["warn_at"]) == ("ok", 0.8)
    listed = owner.get("/budgets").json()
    assert [row["name"] for row in listed] == ["owner"]
    again = root("post", "/budgets", BUDGET)
    assert again.status_code == 422
    assert again.json()["errors"][0]["field"] == "name"
    path = f"/budgets/{listed[0]['id']}"
    assert root("put", path, {**BUDGET, "amount_usd": 0.0}).json()["state"] == "exceeded"
    assert root("put", path, {**BUDGET, "name": "nora"}).status_code == 422
    assert root("delete", path).json() == []
    assert root("delete", path).status_code == 404
    assert not Budget.objects.exists()


def test_prices(root: Caller) -> None:
    row = root("put", "/prices/hardware/modal/H100", {"price_usd_h": 1.5}).json()
    assert (row["price_usd_h"], row["source"]) == (1.5, "settings")
    assert PriceOverride.objects.get().spot_price_usd_h is None
    assert root("put", "/prices/hardware/modal/none", {}).status_code == 404
    prices = {"upload_usd_gb": 0.0, "download_usd_gb": 0.09, "requests_usd_million": 0.4}
    body = root("put", "/prices/traffic/s3", prices).json()
    assert body["traffic"] == [{"scheme": "s3", **prices}]
    assert root("put", "/prices/traffic/ftp", prices).status_code == 422
    assert root("put", "/prices/traffic/s3", {**prices, "upload_usd_gb": -1}).status_code == 422
    assert root("delete", "/prices/traffic/s3").json()["traffic"] == []
    assert not TrafficPrice.objects.exists()


def test_credentials_never_return_a_secret(root: Caller) -> None:
    made = root("post", "/credentials", MODAL)
    assert made.status_code == 201, made.content
    assert made.json()["fields"] == ["MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"]
    sealed = Credential.objects.get().sealed
    path = f"/credentials/{made.json()['id']}"
    rotated = root("put", path, {"name": "prod", "secrets": {"MODAL_TOKEN_SECRET": "as-2"}})
    assert rotated.status_code == 200
    assert Credential.objects.get().sealed != sealed
    listed = root("get", "/credentials")
    assert "topsecret" not in listed.content.decode() + made.content.decode()
    for wrong, field in (
        ({**MODAL, "name": "b", "kind": "none"}, "kind"),
        ({**MODAL, "name": "b", "secrets": {}}, "secrets.MODAL_TOKEN_ID"),
        ({**MODAL, "name": "b", "secrets": {"OTHER": "x"}}, "secrets"),
        (MODAL, "name"),
    ):
        refused = root("post", "/credentials", wrong)
        assert refused.status_code == 422, wrong
        assert refused.json()["errors"][0]["field"] == field
        assert "topsecret" not in refused.content.decode()
    run = seed.run(seed.user("olga", "operator"), replicas=1, committed=1)
    run.pools.update(credential=Credential.objects.get())
    assert root("delete", path).status_code == 409
    run.pools.update(credential=None)
    assert root("delete", path).json() == []


def test_webhooks(root: Caller) -> None:
    made = root("post", "/webhooks", HOOK)
    assert made.status_code == 201, made.content
    assert made.json()["secret"].startswith("whsec_")
    path = f"/webhooks/{made.json()['id']}"
    assert "secret" not in root("get", "/webhooks").json()[0]
    delivery = root("post", f"{path}/test", {})
    assert delivery.status_code == 202
    assert root("get", f"{path}/deliveries").json()[0]["id"] == delivery.json()["id"]
    assert root("post", f"/webhooks/deliveries/{delivery.json()['id']}/repeat").status_code == 200
    assert root("put", path, {**HOOK, "enabled": False}).json()["enabled"] is False
    assert root("post", "/webhooks", {**HOOK, "url": "ftp://x"}).status_code == 422
    assert root("post", "/webhooks", {**HOOK, "name": "b", "kinds": ["x"]}).status_code == 422
    assert root("delete", path).json() == []
    assert not Webhook.objects.exists()


def test_users(root: Caller) -> None:
    made = root("post", "/users", {"name": "nora", "role": "operator"})
    assert made.status_code == 201, made.content
    assert "/account/choose/" in made.json()["link"]
    assert root("post", "/users", {"name": "nora"}).status_code == 422
    assert root("post", "/users", {"name": "no spaces"}).status_code == 422
    assert root("patch", "/users/nora", {"role": "viewer"}).json()["role"] == "viewer"
    assert root("patch", "/users/nora", {"active": False}).json()["active"] is False
    assert root("post", "/users/nora/reset").status_code == 409
    assert root("patch", "/users/nora", {"active": True}).json()["active"] is True
    assert "/account/choose/" in root("post", "/users/nora/reset").json()["link"]
    assert root("patch", "/users/missing", {"role": "viewer"}).status_code == 404
    assert root("patch", "/users/root", {"role": "viewer"}).status_code == 409
    assert [row["name"] for row in root("get", "/users?q=nor").json()] == ["nora"]


def test_a_token_creates_no_token(owner: Any, client: Any) -> None:
    assert owner.post("/tokens", {"name": "second"}).status_code == 403
    client.force_login(seed.user("owner", "operator"))
    made = client.post("/api/tokens", {"name": "second"}, content_type="application/json")
    assert made.status_code == 201, made.content
    assert made.json()["text"].startswith("arch_")
    listed = owner.get("/tokens").json()
    assert [row["name"] for row in listed] == ["second", "a test"]
    left = owner.client.delete(f"/api/tokens/{listed[0]['id']}", headers=owner.headers)
    assert [row["name"] for row in left.json()] == ["a test"]
    assert ApiToken.objects.filter(revoked_at=None).count() == 1


def test_the_state_of_backends_and_its_reset(root: Caller, owner: Any) -> None:
    run = seed_fleet.mixed(seed.user("olga", "operator"))
    run.pools.filter(backend="modal").update(requires_intervention=True, last_error="quota")
    worst = owner.get("/backends/state").json()[0]
    assert (worst["backend"], worst["state"], worst["message"]) == (
        "modal",
        "action_required",
        "quota",
    )
    assert root("post", "/backends/reset", {"backend": "modal"}).json()["pools"] >= 1
    states = {row["backend"]: row["state"] for row in owner.get("/backends/state").json()}
    assert states["modal"] != "action_required"
    unknown = {"backend": "modal", "credential": "none"}
    assert root("post", "/backends/reset", unknown).status_code == 422
