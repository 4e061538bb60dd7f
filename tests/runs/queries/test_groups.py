"""Groups of the runs list with totals: sums, unknown amounts, limits, and their queries."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from archipelago import list_rows
from runs.models import Run, Sweep
from runs.queries import groups
from runs.queries.search import matching, parse
from tests.browser import seed
from tests.runs.queries.test_totals import make

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def viewer() -> Any:
    olga, oscar = seed.user("olga", "operator"), seed.user("oscar", "operator")
    sweep = Sweep.objects.create(
        name="rates",
        owner=olga,
        parameters=[],
        metric="x",
        submit_key="s",
        created_at=timezone.now(),
    )
    make(olga, "alpha", (5.0, "runs"), cost_usd=3.0, tags=["paper", "a b"], eval_loss=2.5)
    make(olga, "beta", (4.0, "ended"), state="failed", cost_usd=9.0, tags=["paper"], eval_loss=2.0)
    make(oscar, "zeta", (None, "runs"), cost_usd=0.5, tokens=7, sweep=sweep)
    return seed.user("vera", "viewer")


def grouped(viewer: Any, by: str, query: str = "", **more: Any) -> dict[str, dict[str, Any]]:
    found = groups.groups(viewer, parse(query), by, **more)
    assert set(found) == {field.name for field in dataclasses.fields(list_rows.RunGroups)}
    return {row["label"]: row for row in found["groups"]}


def test_totals_of_tags(viewer: Any) -> None:
    found = grouped(viewer, "tag")
    assert list(found) == ["paper", "a b", "no tag"]
    paper = found["paper"]
    assert set(paper) == {field.name for field in dataclasses.fields(list_rows.RunGroup)}
    assert (paper["runs"], paper["active"], paper["failed"]) == (2, 1, 1)
    assert (paper["cost_usd"], paper["usd_h"], paper["best_eval_loss"]) == (12.0, 5.0, 2.0)
    rest = found["no tag"]
    assert (rest["cost_known"], rest["usd_h_known"], rest["tokens"]) == (False, False, 7)
    total = groups.groups(viewer, (), "tag")["total"]
    assert (total["runs"], total["cost_usd"], total["cost_known"]) == (3, 12.5, False)


def test_other_groups(viewer: Any) -> None:
    expected = {
        "owner": ["olga", "oscar"],
        "state": ["failed", "running"],
        "sweep": ["no sweep", "rates"],
        "backend": ["Modal"],
    }
    assert {by: list(grouped(viewer, by)) for by in expected} == expected


def test_the_query_of_a_group_finds_its_runs(viewer: Any) -> None:
    for row in (row for by in groups.BY for row in grouped(viewer, by).values()):
        if row["query"]:
            terms = parse(row["query"])
            assert matching(Run.objects.all(), terms).count() == row["runs"], row


def test_a_query_limits_the_runs(viewer: Any) -> None:
    assert list(grouped(viewer, "tag", "state:failed")) == ["paper"]


def test_the_rest_is_one_row(viewer: Any) -> None:
    first, rest = groups.groups(viewer, (), "tag", limit=1)["groups"]
    assert (first["label"], rest["others"], rest["cost_usd"]) == ("paper", 2, 3.5)


def test_too_many_runs_are_reported(viewer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MOST_RUNS", 2)
    found = groups.groups(viewer, (), "owner")
    assert (found["complete"], found["total"]["runs"]) == (False, 2)


def test_a_user_without_a_role_sees_none() -> None:
    assert groups.groups(User.objects.create_user("nora"), (), "owner")["groups"] == []


def test_the_number_of_queries_is_constant(viewer: Any) -> None:
    def count() -> int:
        viewer.refresh_from_db()  # as in a new request, whose roles are not read yet
        with CaptureQueriesContext(connection) as captured:
            groups.groups(viewer, (), "backend")
        return len(captured)

    before = count()
    make(seed.user("olga", "operator"), "more", (5.0, "runs"))
    assert count() == before


def test_the_page_shows_groups_with_links(viewer: Any) -> None:
    Client.force_login(client := Client(), viewer)
    page = client.get("/?group=tag&q=owner:olga").content.decode()
    assert 'href="?q=owner%3Aolga+tag%3Apaper"' in page
    assert 'href="?q=owner%3Aolga+tag%3A%22a+b%22"' in page
    assert "$12.00" in page and "the most expensive first" in page
    assert "<html" not in client.get("/?group=tag&part=1").content.decode()
    assert "No run matches" in client.get("/?group=tag&q=nothing").content.decode()
    assert "data-run=" in client.get("/?group=colour").content.decode()


def test_a_view_keeps_its_groups(viewer: Any) -> None:
    Client.force_login(client := Client(), viewer)
    response = client.post("/views", {"name": "Tags", "back": "?group=tag"})
    assert response["Location"] == "/?group=tag"
    [view] = client.get("/api/views").json()["views"]
    assert (view["name"], view["group"]) == ("Tags", "tag")


def test_the_api_returns_groups(viewer: Any) -> None:
    Client.force_login(client := Client(), viewer)
    body = client.get("/api/runs/groups?by=owner&q=state:running").json()
    assert [(row["key"], row["runs"]) for row in body["groups"]] == [("olga", 1), ("oscar", 1)]
    assert client.get("/api/runs/groups?by=colour").status_code == 422
