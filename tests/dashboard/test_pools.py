"""Pools of an active run: scale, limit the price, add."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.messages import get_messages
from django.test import Client
from django.urls import reverse

from executors.base import AccountError
from runs.models import (
    ReplicaPool,
    Run,
)
from tests.browser import seed, seed_fleet
from tests.dashboard.page_harness import errors_at, pool_fields
from tests.dashboard.stub_backend import Stub, stubbed

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def modal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    yield from stubbed(monkeypatch)


@pytest.fixture
def run(client: Client) -> Any:
    operator_user = seed.user("olga", "operator")
    client.force_login(operator_user)
    return seed_fleet.mixed(operator_user, state="running")


def url(name: str, run: Run, *args: Any) -> str:
    return reverse(name, args=[run.pk, *args])


def messages_of(response: Any) -> str:
    return " ".join(str(m) for m in get_messages(response.wsgi_request))


def test_a_pool_is_scaled(client: Client, run: Run) -> None:
    pool = run.pools.get(backend="local")
    response = client.post(url("pool-scale", run, pool.pk), {"count": "4"})
    assert response["Location"] == url("run", run) + "?tab=replicas"
    assert "CPU of this machine: 4 wanted, 2 more." in messages_of(response)
    assert ReplicaPool.objects.get(pk=pool.pk).replicas.count() == 4


@pytest.mark.parametrize("count", ["", "-1", "x", "1.5", "99999", "9" * 40])
def test_an_invalid_count_is_reported(client: Client, run: Run, count: str) -> None:
    pool = run.pools.get(backend="local")
    response = client.post(url("pool-scale", run, pool.pk), {"count": count})
    assert response.status_code == 302
    assert "was not changed: expected" in messages_of(response)
    assert ReplicaPool.objects.get(pk=pool.pk).count == 2


def test_the_max_price_of_a_pool_is_changed(client: Client, run: Run) -> None:
    pool = run.pools.get(backend="modal")
    address = url("pool-scale", run, pool.pk)

    def limit() -> float | None:
        return ReplicaPool.objects.get(pk=pool.pk).max_price_usd_h

    response = client.post(address, {"count": "3", "max_price_usd_h": "4.5"})
    assert "Modal H100: max price changed." in messages_of(response)
    assert limit() == 4.5
    client.post(address, {"count": "3"})  # the limit is left out, so it does not change
    assert limit() == 4.5
    for wrong in ("x", "-1", "nan", "inf"):
        response = client.post(address, {"count": "3", "max_price_usd_h": wrong})
        assert "was not changed: expected" in messages_of(response)
        assert limit() == 4.5
    client.post(address, {"count": "3", "max_price_usd_h": ""})
    assert limit() is None


def test_a_pool_of_another_run_is_not_scaled(client: Client, run: Run) -> None:
    other = seed.run(seed.user("oscar", "operator"), committed=0, replicas=1)
    pool = other.pools.get()
    assert client.post(url("pool-scale", run, pool.pk), {"count": "3"}).status_code == 404
    assert ReplicaPool.objects.get(pk=pool.pk).count == 1


def test_a_pool_is_added(client: Client, run: Run) -> None:
    response = client.post(url("pool-add", run), pool_fields(count="2"))
    assert response.status_code == 302, response.content.decode()
    assert "CPU of this machine added." in messages_of(response)
    pool = run.pools.latest("id")
    assert (pool.backend, pool.count, pool.replicas.count()) == ("local", 2, 2)
    assert min(pool.replicas.values_list("number", flat=True)) == 10


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"count": "0"}, "count", "greater than or equal to 1"),
        ({"count": "900"}, "backend", "Expected at most"),
        ({"hardware": "modal:H100"}, "hardware", "Expected hardware of Local processes"),
        ({"backend": "modal", "hardware": "modal:H100"}, "backend", "Expected a backend that can"),
    ],
)
def test_pool_errors_are_shown_at_their_field(
    client: Client, run: Run, change: dict[str, str], field: str, text: str
) -> None:
    response = client.post(url("pool-add", run), pool_fields(**change))
    assert response.status_code == 422
    assert text in errors_at(response.content.decode(), f"pools.0.{field}")
    assert run.pools.count() == 5


def test_the_backend_is_checked_before_a_pool_is_added(
    client: Client, run: Run, modal: Stub, settings: Any, tmp_path: Path
) -> None:
    settings.LOOPBACK_BACKENDS = frozenset({"modal"})
    modal.error = AccountError("no such token")
    sent = pool_fields(backend="modal", hardware="modal:H100")
    response = client.post(url("pool-add", run), sent)
    assert response.status_code == 422
    assert "Modal: no such token" in response.content.decode()
    modal.error = None
    assert client.post(url("pool-add", run), sent).status_code == 302


def test_no_pool_can_be_added_to_an_ended_run(client: Client, run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(state="succeeded")
    response = client.post(url("pool-add", run), pool_fields())
    assert response.status_code == 422
    assert "Expected a run that is working, found one succeeded" in response.content.decode()
    page = client.get(url("run", run) + "?tab=replicas").content.decode()
    assert "Add a pool" not in page
