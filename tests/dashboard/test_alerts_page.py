"""Alerts of all runs: the page, the panel of the bell, what is unread, and the API."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from runs.models import Alert, AlertsRead, Run
from runs.queries import alert_inbox
from runs.queries.alert_inbox import AlertFilter
from tests.browser import seed

pytestmark = pytest.mark.django_db


@pytest.fixture
def run() -> Run:
    return seed.run(seed.user("olga", "operator"), name="Islands", replicas=2, committed=1)


@pytest.fixture
def vera(client: Client) -> Any:
    user = seed.user("vera", "viewer")
    type(user).objects.update(date_joined=timezone.now() - timedelta(days=1))
    client.force_login(user)
    return user


def alert(run: Run | None, kind: str = "stalled", **columns: Any) -> Alert:
    now = timezone.now()
    values = {"level": "error", "message": f"message of {kind}", "first_at": now, "opened_at": now}
    return Alert.objects.create(run=run, kind=kind, **{**values, **columns})


def test_open_alerts_fire_and_recent_ones_include_those_that_are_over(
    client: Client, vera: Any, run: Run
) -> None:
    alert(run)
    alert(run, "spike", closed_at=timezone.now())
    firing = client.get(reverse("alerts")).content.decode()
    assert "message of stalled" in firing and "message of spike" not in firing
    recent = client.get(reverse("alerts"), {"show": "recent"}).content.decode()
    assert "message of stalled" in recent and "message of spike" in recent
    assert "message of stalled" in client.get(reverse("alerts"), {"part": "panel"}).content.decode()


def test_an_alert_links_to_its_place(client: Client, vera: Any, run: Run) -> None:
    alert(run, "weights_mismatch")
    alert(run, "replica_lost", replica=run.replicas.get(number=1))
    alert(None, "shared_budget", subject="1 exceeded")
    page = client.get(reverse("alerts")).content.decode()
    assert f'href="/runs/{run.pk}/?tab=rounds"' in page
    assert f'href="{reverse("replica", args=[run.pk, 1])}"' in page
    assert f'href="{reverse("settings-budgets")}"' in page


def test_filters_by_kind_run_and_owner(client: Client, vera: Any, run: Run) -> None:
    alert(run)
    alert(run, "nan")
    other = seed.run(seed.user("oscar", "operator"), name="Other", replicas=1, committed=1)
    alert(other)

    def shown(**query: str) -> int:
        return client.get(reverse("alerts"), query).content.decode().count("alert-title")

    assert shown() == 3
    assert shown(kind="nan") == 1
    assert shown(run=str(run.pk)) == 2
    assert shown(owner="oscar") == 1
    assert shown(run="no id") == shown(kind="a\x00b") == 0


def test_an_alert_is_unread_until_the_user_reads_it(client: Client, vera: Any, run: Run) -> None:
    first = alert(run)
    assert client.get(reverse("alerts-summary")).json() == {"unread": 1}
    later = alert(run, "nan", opened_at=first.opened_at + timedelta(seconds=1))
    until = first.opened_at.isoformat()
    response = client.post(
        reverse("alerts-read"), {"until": until}, headers={"Accept": "application/json"}
    )
    assert response.json() == {"unread": 1}
    client.post(reverse("alerts-read"))
    assert AlertsRead.objects.get().read_at >= later.opened_at - timedelta(seconds=5)
    later.opened_at = timezone.now() + timedelta(minutes=1)
    later.save()
    assert client.get(reverse("alerts-summary")).json() == {"unread": 1}
    Alert.objects.update(acknowledged_at=timezone.now())
    assert client.get(reverse("alerts-summary")).json() == {"unread": 0}
    assert client.post(reverse("alerts-read"), {"until": "yesterday"}).status_code == 422


@pytest.mark.parametrize("until", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59.999999Z"])
def test_the_farthest_times_are_accepted(client: Client, vera: Any, run: Run, until: str) -> None:
    alert(run)
    assert client.post("/alerts/read", {"until": until}).status_code == 302
    assert alert_inbox.unread(vera) == int(until < "2")


def test_the_number_of_unread_alerts_is_bounded(vera: Any, run: Run) -> None:
    now = timezone.now()
    Alert.objects.bulk_create(
        Alert(run=run, kind="stalled", subject=str(n), level="error", first_at=now, opened_at=now)
        for n in range(120)
    )
    assert alert_inbox.unread(vera) == alert_inbox.MOST_UNREAD


def test_pages_lose_and_repeat_no_alert(vera: Any, run: Run) -> None:
    now = timezone.now()
    Alert.objects.bulk_create(
        Alert(run=run, kind="stalled", subject=str(n), level="error", first_at=now, opened_at=now)
        for n in range(7)
    )
    ids, before = [], ""
    while True:
        rows, before = alert_inbox.page(vera, AlertFilter(), before=before, limit=3)
        ids += [row["id"] for row in rows]
        if not before:
            break
    assert sorted(ids) == sorted(Alert.objects.values_list("pk", flat=True))


def test_only_the_owner_and_administrators_acknowledge(client: Client, vera: Any, run: Run) -> None:
    one = alert(run)
    address = reverse("alert-acknowledge", args=[run.pk, one.pk])
    assert "Acknowledge" not in client.get(reverse("alerts")).content.decode()
    assert client.post(address).status_code == 403
    client.force_login(run.owner)
    assert "Acknowledge" in client.get(reverse("alerts")).content.decode()
    assert client.post(address, {"next": "alerts"})["Location"] == reverse("alerts")
    one.refresh_from_db()
    assert one.acknowledged_by == run.owner


def test_a_user_without_a_role_sees_none(client: Client, run: Run) -> None:
    from django.contrib.auth.models import User

    alert(run)
    nora = User.objects.create_user("nora")
    client.force_login(nora)
    assert client.get(reverse("alerts")).status_code == 403
    assert alert_inbox.unread(nora) == 0
    assert alert_inbox.page(nora, AlertFilter())[0] == []


def test_every_page_shows_the_number(client: Client, vera: Any, run: Run) -> None:
    alert(run)
    page = client.get(reverse("planner")).content.decode()
    assert '<span class="bell-n" data-n>1</span>' in page


def test_banners_of_an_open_page_are_fetched(client: Client, vera: Any, run: Run) -> None:
    from runs.models import IngestState

    now = timezone.now()
    IngestState.objects.create(
        run=run, trouble="away", trouble_since=now - timedelta(minutes=5), message="away"
    )
    address = f"{reverse('banners')}?run={run.pk}"
    assert "Progress is unknown" in client.get(address).content.decode()
    assert "Progress is unknown" not in client.get(reverse("banners")).content.decode()
    assert client.get(reverse("banners"), {"run": "x"}).status_code == 404
