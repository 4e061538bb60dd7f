"""The runs list: order, pages, empty states, number of queries."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from dashboard.views import runs as view
from runs.models import Run
from tests.browser import seed

pytestmark = pytest.mark.django_db


def bare_run(owner: Any, number: int, at: datetime.datetime) -> Run:
    return Run.objects.create(
        name=f"run {number:03d}",
        owner=owner,
        state="queued",
        state_since=at,
        created_at=at,
        rendezvous=f"file:///nowhere/{number}",
        group_settings=seed.group_settings(),
        workload={},
        submit_key=str(number),
    )


def test_an_empty_list_links_to_the_demo(client: Client, operator_user: Any) -> None:
    page = client.get("/").content.decode()
    assert "No runs yet" in page
    assert 'href="/runs/new"' in page
    assert "Local demo" in page


def test_an_empty_list_offers_viewers_no_forbidden_action(client: Client) -> None:
    client.force_login(seed.user("vera", "viewer"))
    page = client.get("/").content.decode()
    assert "No runs yet" in page
    assert "/runs/new" not in page


def test_pages_show_every_run_once_newest_first(
    client: Client, operator_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "PAGE_SIZE", 3)
    now = timezone.now()
    # Two runs with the same time at the edge of a page: the id decides.
    ages = [0, 1, 2, 2, 3, 4, 5]
    for number, age in enumerate(ages):
        bare_run(operator_user, number, now - datetime.timedelta(seconds=age))
    seen, url = [], "/"
    for _ in range(3):
        response = client.get(url)
        seen += [row.header["name"] for row in response.context["rows"]]
        url = f"/?before={response.context['older'].replace('+', '%2B')}"
    assert len(seen) == len(set(seen)) == 7
    assert response.context["older"] == ""
    assert seen[0] == "run 000"
    assert seen[-1] == "run 006"


@pytest.mark.parametrize(
    "before", ["nonsense", "2026-01-01T00:00:00_x", "_", "2026-99-99_" + "0" * 32]
)
def test_a_broken_cursor_shows_the_first_page(
    client: Client, operator_user: Any, before: str
) -> None:
    bare_run(operator_user, 1, timezone.now())
    response = client.get("/", {"before": before})
    assert response.status_code == 200
    assert len(response.context["rows"]) == 1


@pytest.mark.parametrize(
    "path", ["/", "/runs.json", "/?differ=1&columns=state,tags,owner,backends,ran,age,cost,speed"]
)
def test_the_number_of_queries_is_constant(
    client: Client, operator_user: Any, django_assert_num_queries: Any, path: str
) -> None:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    seed.run(operator_user, committed=1, replicas=2)
    with CaptureQueriesContext(
        connection,
    ) as few:
        client.get(path)
    for number in range(5):
        seed.run(operator_user, name=f"r{number}", committed=1, replicas=3)
    with django_assert_num_queries(len(few)):
        client.get(path)


def test_names_are_escaped(client: Client, operator_user: Any) -> None:
    seed.run(operator_user, name="<img src=x onerror=alert(1)>", committed=0)
    page = client.get("/").content.decode()
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page


def test_unknown_values_are_dashes(client: Client, operator_user: Any) -> None:
    run = seed.run(operator_user, committed=0, state="provisioning")
    page = client.get("/").content.decode()
    row = page[page.index(f'data-run="{run.pk}"') :]
    assert 'data-f="eval_loss">–<' in row
