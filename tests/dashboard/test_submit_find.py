"""*Find* in the *Source* of the submit form: it searches all runs and keeps the input."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from dashboard.views.submit_source import OFFERED
from runs.models import Checkpoint, Run
from tests.browser import seed
from tests.dashboard.test_submit_source import names, values_of

pytestmark = pytest.mark.django_db
NEW = "/runs/new"


@pytest.fixture
def many(operator_user: Any) -> User:
    """More runs than are offered; *Needle* is the oldest and has a checkpoint."""
    needle = seed.run(operator_user, name="Needle", committed=2)
    Run.objects.filter(pk=needle.pk).update(created_at=timezone.now() - timedelta(days=400))
    Checkpoint.objects.create(
        run=needle, round=2, key="k", size_bytes=1, digest="d", created_at=timezone.now()
    )
    now, one = timezone.now(), Run.objects.get(pk=needle.pk)
    Run.objects.bulk_create(
        Run(
            name=f"Hay {n}",
            owner=operator_user,
            state="succeeded",
            state_since=now,
            created_at=now - timedelta(seconds=n),
            rendezvous=f"file:///hay/{n}",
            group_settings=one.group_settings,
            workload=one.workload,
            submit_key=f"hay-{n}",
        )
        for n in range(OFFERED + 5)
    )
    return operator_user


def source_of(response: Any) -> Any:
    assert response.status_code == 200
    return response.context["source"]


def test_the_newest_runs_are_offered_with_a_note_about_more(client: Client, many: User) -> None:
    response = client.get(NEW)
    source = source_of(response)
    assert len(source["clone"]["options"]) == OFFERED
    assert source["clone"]["more"]
    assert names(source["clone"])[0] == "Hay 0 · 0 rounds"
    assert "The 50 newest are listed" in response.content.decode()
    assert names(source["fork"]) == ["Needle · 2 rounds"]


@pytest.mark.parametrize("kind", ["clone", "fork"])
@pytest.mark.parametrize("how", ["button", "enter", "address"])
def test_any_run_can_be_found_and_input_is_kept(
    client: Client, many: User, kind: str, how: str
) -> None:
    find = {f"find_{kind}": "needle"}
    if how == "address":
        response = client.get(NEW, find)
    else:
        typed = {"name": "Half typed", "budget_usd": "not yet", "pools.0.count": "7"}
        press = {"search": kind} if how == "button" else {"dry_run": "enter"}
        response = client.post(NEW, values_of(client) | typed | find | press)
        form = response.context["form"]
        assert (form["name"].value(), form["budget_usd"].value()) == ("Half typed", "not yet")
        assert form.pools[0]["count"].value() == "7"
        assert form.all_errors == {}  # it was not posted to launch
        assert not response.context["dry_run"]
    source = source_of(response)
    assert names(source[kind]) == ["Needle · 2 rounds"]
    assert source["kind"] == kind
    page = response.content.decode()
    assert f'name="source" value="{kind}" checked' in page
    assert f'name="found_{kind}" value="needle"' in page
    assert "1 found." in page
    assert Run.objects.count() == OFFERED + 6


def test_enter_elsewhere_is_a_dry_run_after_a_search_too(client: Client, many: User) -> None:
    again = {"find_clone": "needle", "found_clone": "needle", "dry_run": "enter", "name": ""}
    response = client.post(NEW, values_of(client) | again)
    assert response.status_code == 422
    assert "name" in response.context["form"].all_errors


def test_find_supports_the_query_language_of_the_list(client: Client, many: User) -> None:
    oscar = seed.user("oscar", "operator")
    seed.run(oscar, name="His", state="failed", committed=0)
    archived = seed.run(many, name="Put away", state="failed", committed=0)
    Run.objects.filter(pk=archived.pk).update(archived_at=timezone.now())

    def result(query: str) -> list[str]:
        source = source_of(client.get(NEW, {"find_clone": query}))
        return [name.partition(" · ")[0] for name in names(source["clone"])]

    assert result("owner:oscar state:failed") == ["His"]
    assert result("age>1w") == ["Needle"]
    assert result("put") == []
    assert result("is:archived") == ["Put away"]
    assert result(f"id:{archived.pk}") == ["Put away"]


def test_invalid_queries_and_no_matches_are_reported(client: Client, many: User) -> None:
    response = client.get(NEW, {"find_clone": "loss<x"})
    assert source_of(response)["clone"]["options"] == []
    assert "loss&lt;x: " in response.content.decode()
    page = client.get(NEW, {"find_fork": "hay"}).content.decode()
    assert "No run with a checkpoint matches." in page
    assert "No run with a checkpoint found" in page
    for odd in ("\x00", "x" * 501, '"', "<script>alert(1)</script>"):
        response = client.get(NEW, {"find_clone": odd})
        assert response.status_code == 200
        assert b"<script>alert" not in response.content


def test_matches_come_before_the_prefilled_run(client: Client, many: User) -> None:
    hay = seed.run(many, name="Hay with a pool", state="succeeded", committed=1)
    source = source_of(client.get(NEW, {"clone": str(hay.pk), "find_clone": "needle"}))
    assert names(source["clone"]) == ["Needle · 2 rounds"]


def test_the_number_of_queries_of_a_search_is_constant(
    client: Client, many: User, django_assert_max_num_queries: Any
) -> None:
    with django_assert_max_num_queries(21):
        client.get(NEW, {"find_clone": "hay", "find_fork": "needle"})


def test_viewers_cannot_search(many: User) -> None:
    client = Client()
    client.force_login(seed.user("vera", "viewer"))
    assert client.get(NEW, {"find_clone": "needle"}).status_code == 403
    assert client.post(NEW, {"search": "clone", "find_clone": "needle"}).status_code == 403
