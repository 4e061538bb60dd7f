"""*Find* in the submit form's *Source*: any of thousands of runs, and nothing typed is lost."""

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
def many(olga: Any) -> User:
    """More than are offered; *Needle* is older than all of them and has a checkpoint."""
    needle = seed.run(olga, name="Needle", committed=2)
    Run.objects.filter(pk=needle.pk).update(created_at=timezone.now() - timedelta(days=400))
    Checkpoint.objects.create(
        run=needle, round=2, key="k", size_bytes=1, digest="d", created_at=timezone.now()
    )
    now, one = timezone.now(), Run.objects.get(pk=needle.pk)
    Run.objects.bulk_create(
        Run(
            name=f"Hay {n}", owner=olga, state="succeeded", state_since=now,
            created_at=now - timedelta(seconds=n),
            rendezvous=f"file:///hay/{n}", group_settings=one.group_settings,
            workload=one.workload, submit_key=f"hay-{n}",
        )
        for n in range(OFFERED + 5)
    )  # fmt: skip
    return olga


def source_of(answer: Any) -> Any:
    assert answer.status_code == 200
    return answer.context["source"]


def test_the_newest_are_offered_and_that_there_are_more_is_said(client: Client, many: User) -> None:
    answer = client.get(NEW)
    source = source_of(answer)
    assert len(source["clone"]["options"]) == OFFERED
    assert source["clone"]["more"]
    assert names(source["clone"])[0] == "Hay 0 · 0 rounds"
    assert "The 50 newest are offered" in answer.content.decode()
    assert names(source["fork"]) == ["Needle · 2 rounds"]


@pytest.mark.parametrize("kind", ["clone", "fork"])
@pytest.mark.parametrize("how", ["button", "enter", "address"])
def test_any_run_is_found_and_nothing_typed_is_lost(
    client: Client, many: User, kind: str, how: str
) -> None:
    find = {f"find_{kind}": "needle"}
    if how == "address":
        answer = client.get(NEW, find)
    else:
        typed = {"name": "Half typed", "budget_usd": "not yet", "pools.0.count": "7"}
        press = {"search": kind} if how == "button" else {"dry_run": "enter"}
        answer = client.post(NEW, values_of(client) | typed | find | press)
        form = answer.context["form"]
        assert (form["name"].value(), form["budget_usd"].value()) == ("Half typed", "not yet")
        assert form.pools[0]["count"].value() == "7"
        assert form.all_errors == {}  # it was not sent to be launched
        assert not answer.context["dry_run"]
    source = source_of(answer)
    assert names(source[kind]) == ["Needle · 2 rounds"]
    assert source["kind"] == kind
    page = answer.content.decode()
    assert f'name="source" value="{kind}" checked' in page
    assert f'name="found_{kind}" value="needle"' in page
    assert "1 found." in page
    assert Run.objects.count() == OFFERED + 6


def test_enter_elsewhere_is_a_dry_run_after_a_search_too(client: Client, many: User) -> None:
    again = {"find_clone": "needle", "found_clone": "needle", "dry_run": "enter", "name": ""}
    answer = client.post(NEW, values_of(client) | again)
    assert answer.status_code == 422
    assert "name" in answer.context["form"].all_errors


def test_the_whole_language_of_the_list_is_understood(client: Client, many: User) -> None:
    oscar = seed.user("oscar", "operator")
    seed.run(oscar, name="His", state="failed", committed=0)
    archived = seed.run(many, name="Put away", state="failed", committed=0)
    Run.objects.filter(pk=archived.pk).update(archived_at=timezone.now())

    def found(query: str) -> list[str]:
        source = source_of(client.get(NEW, {"find_clone": query}))
        return [name.partition(" · ")[0] for name in names(source["clone"])]

    assert found("owner:oscar state:failed") == ["His"]
    assert found("age>1w") == ["Needle"]
    assert found("put") == []
    assert found("is:archived") == ["Put away"]
    assert found(f"id:{archived.pk}") == ["Put away"]


def test_what_is_not_understood_or_not_there_is_said(client: Client, many: User) -> None:
    answer = client.get(NEW, {"find_clone": "loss<x"})
    assert source_of(answer)["clone"]["options"] == []
    assert "loss&lt;x: " in answer.content.decode()
    page = client.get(NEW, {"find_fork": "hay"}).content.decode()
    assert "No run is like that and has a checkpoint." in page
    assert "None with a checkpoint was found" in page
    for odd in ("\x00", "x" * 501, '"', "<script>alert(1)</script>"):
        answer = client.get(NEW, {"find_clone": odd})
        assert answer.status_code == 200
        assert b"<script>alert" not in answer.content


def test_what_is_found_stands_before_what_the_page_was_filled_in_with(
    client: Client, many: User
) -> None:
    hay = seed.run(many, name="Hay with a pool", state="succeeded", committed=1)
    source = source_of(client.get(NEW, {"clone": str(hay.pk), "find_clone": "needle"}))
    assert names(source["clone"]) == ["Needle · 2 rounds"]


def test_a_search_costs_as_much_with_many_runs(
    client: Client, many: User, django_assert_max_num_queries: Any
) -> None:
    with django_assert_max_num_queries(15):
        client.get(NEW, {"find_clone": "hay", "find_fork": "needle"})


def test_a_viewer_searches_nothing(many: User) -> None:
    client = Client()
    client.force_login(seed.user("vera", "viewer"))
    assert client.get(NEW, {"find_clone": "needle"}).status_code == 403
    assert client.post(NEW, {"search": "clone", "find_clone": "needle"}).status_code == 403
