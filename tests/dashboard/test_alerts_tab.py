"""Alerts on the Activity tab: visibility, acknowledging, and the counts on tab and list."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from runs.models import Alert
from tests.browser import seed
from tests.dashboard.page_harness import KINDS, client_for

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
        run=run,
        kind=kind,
        level="warning",
        first_at=now,
        opened_at=now,
        notified_at=now,
        closed_at=None if open else now,
        **more,
    )


def shown(count: int) -> str:
    return f"<span data-n>{count}</span>"


@pytest.mark.parametrize("kind", KINDS)
def test_viewers_see_alerts_and_operators_acknowledge_them(
    kind: str, run: Any, alert: Alert
) -> None:
    client = client_for(kind, run.owner)
    may = kind in ("owner", "admin")
    seen = client.get(f"/runs/{run.pk}/activity")
    if kind == "anonymous":
        assert seen["Location"].startswith("/login")
    else:
        page = seen.content.decode()
        assert "loss &lt;9&gt; in round 7" in page
        assert ("Acknowledge<" in page) == may
        assert (b"Acknowledge<" in client.get(f"/runs/{run.pk}/?tab=activity").content) == may
    response = client.post(f"/runs/{run.pk}/alerts/{alert.pk}/acknowledge")
    alert.refresh_from_db()
    assert (alert.acknowledged_by is not None) == may
    if may:
        assert response["Location"] == f"/runs/{run.pk}/?tab=activity&source=alert"
        assert "acknowledged by" in client.get(f"/runs/{run.pk}/activity").content.decode()
    else:
        assert response.status_code == (302 if kind == "anonymous" else 403)


def test_users_without_a_role_see_no_alerts(run: Any, alert: Alert) -> None:
    client = Client()
    client.force_login(seed.user("no-role", ""))
    assert client.get(f"/runs/{run.pk}/activity").status_code == 404
    assert client.post(f"/runs/{run.pk}/alerts/{alert.pk}/acknowledge").status_code == 404


def test_an_alert_of_another_run_is_a_404(run: Any) -> None:
    other = make(seed.run(seed.user("other", "operator"), committed=0), "spike", message="x")
    client = client_for("owner", run.owner)
    assert client.post(f"/runs/{run.pk}/alerts/{other.pk}/acknowledge").status_code == 404


def test_acknowledge_requires_post_and_csrf_token(run: Any, alert: Alert) -> None:
    client = client_for("owner", run.owner, enforce_csrf_checks=True)
    assert client.post(f"/runs/{run.pk}/alerts/{alert.pk}/acknowledge").status_code == 403
    assert client.get(f"/runs/{run.pk}/alerts/{alert.pk}/acknowledge").status_code == 405


def test_the_counts_include_only_open_unacknowledged_alerts(run: Any, alert: Alert) -> None:
    make(run, "nan", subject="replica 1", message="x")
    make(run, "goodput", open=False, message="x")
    client = client_for("owner", run.owner)
    for path in ("/", f"/runs/{run.pk}/"):
        assert shown(2) in client.get(path).content.decode()
    client.post(f"/runs/{run.pk}/alerts/{alert.pk}/acknowledge")
    for path in ("/", f"/runs/{run.pk}/"):
        assert shown(1) in client.get(path).content.decode()


def test_no_alerts_shows_a_message_and_no_count(run: Any) -> None:
    client = client_for("owner", run.owner)
    page = client.get(f"/runs/{run.pk}/?tab=activity&source=alert").content.decode()
    assert "No matching activity." in page
    assert "data-alert-count hidden" in page


def test_the_number_of_queries_does_not_depend_on_alerts(
    run: Any, alert: Alert, django_assert_num_queries: Any
) -> None:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    client = client_for("owner", run.owner)
    with CaptureQueriesContext(connection) as few:
        client.get(f"/runs/{run.pk}/activity")
    for number in range(20):
        make(
            run,
            "replica_lost",
            subject=f"replica {number}",
            message="x",
            acknowledged_by=run.owner,
            acknowledged_at=timezone.now(),
        )
    with django_assert_num_queries(len(few)):
        client.get(f"/runs/{run.pk}/activity")
