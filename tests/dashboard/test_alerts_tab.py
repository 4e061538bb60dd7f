"""The Alerts tab: who sees it, who acknowledges, and the numbers on tab and list."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from runs.models import Alert
from tests.browser import seed
from tests.dashboard.people import KINDS, client_for

pytestmark = pytest.mark.django_db


@pytest.fixture
def run() -> Any:
    return seed.run(seed.user("owner", "operator"), committed=2, replicas=2)


@pytest.fixture
def alert(run: Any) -> Alert:
    return make(run, "spike", message="loss <9> in round 7")


def make(run: Any, kind: str, *, open: bool = True, **more: Any) -> Alert:
    now = timezone.now()
    return Alert.objects.create(
        run=run, kind=kind, level="warning", first_at=now, opened_at=now, told_at=now,
        closed_at=None if open else now, **more,
    )  # fmt: skip


def shown(count: int) -> str:
    return f"<span data-n>{count}</span>"


@pytest.mark.parametrize("kind", KINDS)
def test_everybody_with_a_role_sees_them_and_who_may_operate_acknowledges(
    kind: str, run: Any, alert: Alert
) -> None:
    client = client_for(kind, run.owner)
    may = kind in ("owner", "admin")
    seen = client.get(f"/runs/{run.pk}/alerts")
    if kind == "anonymous":
        assert seen["Location"].startswith("/login")
    else:
        page = seen.content.decode()
        assert "loss &lt;9&gt; in round 7" in page
        assert ("Acknowledge<" in page) == may
        assert (b"Acknowledge<" in client.get(f"/runs/{run.pk}/?tab=alerts").content) == may
    answer = client.post(f"/runs/{run.pk}/alerts/{alert.pk}/acknowledge")
    alert.refresh_from_db()
    assert (alert.acknowledged_by is not None) == may
    if may:
        assert answer["Location"] == f"/runs/{run.pk}/?tab=alerts"
        assert "seen by" in client.get(f"/runs/{run.pk}/alerts").content.decode()
    else:
        assert answer.status_code == (302 if kind == "anonymous" else 403)


def test_somebody_without_a_role_finds_none(run: Any, alert: Alert) -> None:
    client = Client()
    client.force_login(seed.user("nobody", ""))
    assert client.get(f"/runs/{run.pk}/alerts").status_code == 404
    assert client.post(f"/runs/{run.pk}/alerts/{alert.pk}/acknowledge").status_code == 404


def test_an_alert_of_another_run_is_not_there(run: Any) -> None:
    other = make(seed.run(seed.user("other", "operator"), committed=0), "spike", message="x")
    client = client_for("owner", run.owner)
    assert client.post(f"/runs/{run.pk}/alerts/{other.pk}/acknowledge").status_code == 404


def test_only_by_post_with_a_token(run: Any, alert: Alert) -> None:
    client = client_for("owner", run.owner, enforce_csrf_checks=True)
    assert client.post(f"/runs/{run.pk}/alerts/{alert.pk}/acknowledge").status_code == 403
    assert client.get(f"/runs/{run.pk}/alerts/{alert.pk}/acknowledge").status_code == 405


def test_the_numbers_count_what_is_open_and_not_acknowledged(run: Any, alert: Alert) -> None:
    make(run, "nan", subject="replica 1", message="x")
    make(run, "goodput", open=False, message="x")
    client = client_for("owner", run.owner)
    for path in ("/", f"/runs/{run.pk}/"):
        assert shown(2) in client.get(path).content.decode()
    client.post(f"/runs/{run.pk}/alerts/{alert.pk}/acknowledge")
    for path in ("/", f"/runs/{run.pk}/"):
        assert shown(1) in client.get(path).content.decode()


def test_none_says_so_and_shows_no_number(run: Any) -> None:
    page = client_for("owner", run.owner).get(f"/runs/{run.pk}/?tab=alerts").content.decode()
    assert "Nothing has called for attention" in page
    assert "data-alert-count hidden" in page


def test_many_cost_no_more_queries_than_one(
    run: Any, alert: Alert, django_assert_num_queries: Any
) -> None:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    client = client_for("owner", run.owner)
    with CaptureQueriesContext(connection) as few:
        client.get(f"/runs/{run.pk}/alerts")
    for number in range(20):
        make(run, "replica_lost", subject=f"replica {number}", message="x",
             acknowledged_by=run.owner, acknowledged_at=timezone.now())  # fmt: skip
    with django_assert_num_queries(len(few)):
        client.get(f"/runs/{run.pk}/alerts")
