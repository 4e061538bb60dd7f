"""The commands about alerts of all runs, search and settings against a live server."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from runs.models import Alert, Credential, Webhook
from tests.browser import seed, seed_fleet

pytestmark = pytest.mark.django_db(transaction=True)

Call = Callable[..., Any]


@pytest.fixture
def root(
    signed_in: str, token_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Sign in as an administrator."""
    from runs.backends import price_settings

    monkeypatch.setenv("ARCHIPELAGO_TOKEN", token_of("root", "admin", "read", "operate", "admin"))
    yield signed_in
    price_settings._copy = price_settings._Copy()


def test_alerts_of_all_runs(call: Call, signed_in: str) -> None:
    run = seed.run(seed.user("olga", "operator"), name="Islands", replicas=1, committed=1)
    now = timezone.now() + timedelta(seconds=1)
    Alert.objects.create(
        run=run, kind="stalled", level="error", message="m\x1b[2J", first_at=now, opened_at=now
    )
    result = call("alerts", "--firing")
    assert result.code == 1
    assert "firing  Islands" in result.out and "Stalled: m" in result.out
    assert "\x1b" not in result.out
    assert result.err == "1 firing, 1 unread\n"
    assert json.loads(call("alerts", "--json").out)["firing"] == 1
    Alert.objects.update(opened_at=timezone.now() - timedelta(seconds=1))
    assert call("alerts", "--mark-read").code == 0
    assert call("alerts").err == "1 firing, 0 unread\n"


def test_search(call: Call, signed_in: str) -> None:
    seed.run(seed.user("olga", "operator"), name="Islands", replicas=2, committed=1)
    result = call("search", "islands", "1")
    assert "Replica 1" in result.out and f"{signed_in}/runs/" in result.out
    assert call("search", "no", "such").err == "nothing matches\n"


def test_budgets(call: Call, root: str) -> None:
    assert call("budgets", "ls").err == "no budgets\n"
    assert call("budgets", "set", "owner", "root", "500", "--period", "week").code == 0
    assert call("budgets", "set", "owner", "root", "0", "--period", "week").code == 0
    result = call("budgets", "ls")
    assert result.code == 1 and "exceeded" in result.out and result.out.count("root") == 1
    assert call("budgets", "set", "owner", "nora", "1").code == 6
    assert call("budgets", "delete", "owner", "root").code == 5
    assert call("budgets", "delete", "owner", "root", "--period", "week").code == 0


def test_prices(call: Call, root: str) -> None:
    assert call("prices", "set", "modal", "H100", "1.5").code == 0
    result = call("prices", "ls", "--backend", "modal")
    assert any(
        line.split()[1:3] + line.split()[-1:] == ["H100", "$1.50", "settings"]
        for line in result.out.splitlines()
    ), result.out
    assert call("prices", "set", "modal", "H100").code == 2
    assert call("prices", "traffic", "s3", "--download", "0.09").code == 0
    assert "traffic of s3://: $0 up and $0.09 down a GB" in call("prices", "ls").out
    assert call("prices", "traffic", "s3", "--remove").code == 0


def test_credentials(call: Call, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = ("--secret", "MODAL_TOKEN_ID", "--secret", "MODAL_TOKEN_SECRET")
    monkeypatch.setattr("sys.stdin", io.StringIO("ak-1\nas-topsecret\n"))
    result = call("credentials", "add", "prod", "--kind", "modal", *values)
    assert (result.code, result.out) == (
        0,
        "prod: holds MODAL_TOKEN_ID, MODAL_TOKEN_SECRET; test it\n",
    )
    before = Credential.objects.get()
    monkeypatch.setattr("sys.stdin", io.StringIO("as-other\n"))
    assert call("credentials", "rotate", "prod", "--secret", "MODAL_TOKEN_SECRET").code == 0
    assert Credential.objects.get().sealed != before.sealed
    assert "topsecret" not in call("credentials", "ls").out
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert call("credentials", "rotate", "prod", "--secret", "MODAL_TOKEN_SECRET").code == 2
    assert call("credentials", "rotate", "none").code == 5
    assert call("credentials", "delete", "prod").code == 0


def test_webhooks(call: Call, root: str) -> None:
    added = call("webhooks", "add", "Chat", "http://127.0.0.1/x", "--kind", "finished")
    assert added.code == 0 and added.out.startswith("whsec_")
    assert Webhook.objects.get().kinds == ["finished"]
    assert call("webhooks", "test", "Chat").code == 0
    assert "waiting" in call("webhooks", "deliveries", "Chat").out
    assert "Chat" in call("webhooks", "ls").out
    assert call("webhooks", "delete", "Chat").code == 0
    assert call("webhooks", "ls").err == "no webhooks\n"


def test_users_and_tokens(call: Call, root: str) -> None:
    assert "/account/choose/" in call("users", "add", "nora", "--role", "operator").out
    assert "invited" in call("users", "ls", "-q", "nora").out
    assert call("users", "role", "nora", "viewer").out == "nora: viewer\n"
    assert call("users", "deactivate", "nora").out == "nora: deactivated\n"
    assert call("users", "activate", "nora").out == "nora: active\n"
    assert "/account/choose/" in call("users", "reset", "nora").out
    [token] = json.loads(call("tokens", "ls", "--json").out)
    assert call("tokens", "revoke", str(token["id"])).code == 0
    assert call("tokens", "ls").code == 4


def test_the_state_of_backends(call: Call, root: str) -> None:
    run = seed_fleet.mixed(seed.user("olga", "operator"))
    run.pools.filter(backend="modal").update(requires_intervention=True, last_error="quota")
    result = call("backends", "--state")
    assert "action required" in result.out and "quota" in result.out
    assert call("backends", "--reset", "modal").out.startswith("launches of ")


def test_settings_need_the_scope(call: Call, signed_in: str) -> None:
    result = call("credentials", "ls")
    assert result.code == 4
    assert "expected the scope admin" in result.err
