"""What the runs list shows of its runs: columns, what differs, and that what is old is said."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dashboard.list_address import ListAddress
from runs.backends import health
from runs.models import Run
from runs.queries import table
from runs.queries.listing import SORTS
from tests.browser import seed

pytestmark = pytest.mark.django_db


def heads(page: str) -> list[str]:
    found = re.findall(r'role="columnheader"[^>]*>(?:<a[^>]*>)?([^<]*)', page)
    return [head for head in found if head]


def labels(page: str) -> list[str]:
    """Of the first card, as they are below 720 px."""
    return re.findall(r'data-label="([^"]+)"', page[page.index("data-run=") :].split("</tr>")[0])


def test_the_usual_columns_are_left_out_of_the_address(client: Client, olga: Any) -> None:
    seed.run(olga, committed=1, replicas=1)
    page = client.get("/").content.decode()
    assert heads(page) == [
        "State", "Run", "Replicas", "Rounds", "Eval loss", "Train loss", "Tokens", "Tokens/s",
        "Goodput", "Cost", "Started", "Ran for",
    ]  # fmt: skip
    assert "columns=" not in "".join(re.findall(r'href="([^"]*)"', page))


def test_every_column_can_be_shown_alone_in_table_and_cards(client: Client, olga: Any) -> None:
    run = seed.run(olga, committed=1, replicas=1)
    Run.objects.filter(pk=run.pk).update(tags=["a-tag"])
    below = {"owner": "olga", "backends": "local", "tags": "a-tag"}
    for column in table.COLUMNS:
        page = client.get("/", {"columns": column.name}).content.decode()
        row = page[page.index("data-run=") :].split("</tr>")[0]
        shown = [] if column.below else [column.label]
        assert heads(page) == list(
            dict.fromkeys(["State", "Run"] if column.name == "state" else ["Run", *shown])
        )
        assert labels(page) == ([] if column.below or column.name in ("state", "name") else shown)
        under = re.sub(r"<[^>]+>", "", row.split('class="muted"')[1].split("</th>")[0])
        for name, text in below.items():
            assert (text in under) == (name == column.name)


def test_columns_of_a_form_and_of_a_link_are_the_same(client: Client, olga: Any) -> None:
    seed.run(olga, committed=1, replicas=1)
    by_form = client.get("/?columns=name&columns=cost&columns=loss&differ=1&sort=-cost")
    assert str(by_form.context["here"]) == "?sort=-cost&columns=name,loss,cost&differ=1"
    by_link = client.get(f"/{by_form.context['here']}")
    assert heads(by_form.content.decode()) == heads(by_link.content.decode())
    assert by_link.context["here"] == by_form.context["here"]


def test_columns_stay_when_one_sorts_filters_and_turns_pages(client: Client, olga: Any) -> None:
    seed.run(olga, committed=1, replicas=1)
    page = client.get("/?q=state:running&columns=name,loss&facets=1").content.decode()
    addresses = re.findall(r'href="(\?[^"]*)"', page)
    assert len(addresses) > 5
    usual = [a for a in addresses if "columns=name,loss" not in a]
    assert usual == ["?q=state%3Arunning"]  # "As usual"
    assert '<input type="hidden" name="columns" value="name,loss">' in page
    assert 'name="columns" value="loss" checked' in page
    assert 'name="columns" value="cost" checked' not in page


@pytest.mark.parametrize("columns", ["", "nonsense", ",", "<script>"])
def test_columns_there_are_none_of_show_the_usual(client: Client, olga: Any, columns: str) -> None:
    answer = client.get("/", {"columns": columns})
    assert answer.context["shown"] == table.DEFAULT
    assert "<script>" not in answer.content.decode()


def test_every_order_of_a_column_is_one() -> None:
    assert {column.sort for column in table.COLUMNS if column.sort} == set(SORTS)


def test_only_settings_in_which_the_shown_runs_differ(client: Client, olga: Any) -> None:
    for name, sync_every in (("a", 40), ("b", 80), ("c", 80)):
        seed.run(olga, name=name, committed=1, replicas=1, sync_every=sync_every)
    Run.objects.filter(name="a").update(budget_usd=5)  # a limit is no setting of the group
    Run.objects.filter(name="c").update(workload={"kind": "byte_gpt", "size": "<b>large"})
    page = client.get("/?differ=1&sort=name").content.decode()
    heads_of = re.findall(r'c-differ" title="([^"]+)">([^<]+)', page)
    assert ("settings.sync_every", "Local steps (H)") in heads_of
    assert ("workload.size", "Size") in heads_of
    assert all(name.startswith(("settings.", "workload.")) for name in dict(heads_of))
    assert "settings.num_replicas" not in dict(heads_of)
    assert re.findall(r'data-label="Local steps \(H\)"[^>]*><span[^>]*>(\d+)', page) == [
        "40",
        "80",
        "80",
    ]
    assert "<b>large" not in page
    two = client.get("/?differ=1&q=name:b,c").content.decode()
    assert "settings.sync_every" not in two
    assert "One run alone" in client.get("/?differ=1&q=name:a").content.decode()
    assert "c-differ" not in client.get("/").content.decode()


def test_a_run_of_an_older_version_differs_by_what_it_lacks(client: Client, olga: Any) -> None:
    one = seed.run(olga, name="a", committed=1, replicas=1)
    seed.run(olga, name="b", committed=1, replicas=1)
    settings = dict(one.group_settings)
    del settings["outer_lr"]
    Run.objects.filter(pk=one.pk).update(group_settings=settings)
    page = client.get("/?differ=1").content.decode()
    assert "settings.outer_lr" in page


def test_a_hundred_differing_settings_are_not_shown(
    client: Client, olga: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "MOST_DIFFERING", 1)
    seed.run(olga, name="a", committed=1, replicas=1, sync_every=10)
    seed.run(olga, name="b", committed=1, replicas=1, sync_every=20, total_rounds=500)
    page = client.get("/?differ=1").content.decode()
    assert page.count('<th scope="col" role="columnheader" class="num c-differ"') == 1
    assert re.search(r"\d more are in the comparison", page)


def test_what_differs_costs_no_query(client: Client, olga: Any) -> None:
    for name in "abcd":
        seed.run(olga, name=name, committed=1, replicas=2, sync_every=10 * ord(name))

    def asked(address: str) -> int:
        with CaptureQueriesContext(connection) as queries:
            client.get(address)
        return len(queries)

    assert asked("/?differ=1") == asked("/")


def test_an_address_is_read_as_it_was_written() -> None:
    for text in ("?", "?q=a+b&sort=-loss", "?columns=state,name&differ=1", "?q=tag%3Ax%26y"):
        assert str(ListAddress.of_text(text)) == text


# What is old is said.


def silent(page: str) -> bool:
    found = re.search(r'data-banner="silent"[^>]*>', page)
    assert found
    return "hidden" not in found[0]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what stands in the broker: seconds ago, '' for nothing, None: the broker is away."""

    class Broker:
        def get(self, key: str) -> bytes | None:
            if self.ago is None:
                raise OSError("away")
            at = timezone.now().timestamp() - self.ago if self.ago != "" else 0.0
            return str(at).encode() if at else None

        def xrevrange(self, *_: Any, **__: Any) -> list[Any]:
            return []

    broker: Any = Broker()
    monkeypatch.setattr("runs.live_stream.client", lambda: broker)

    def hear(ago: float | str | None) -> None:
        broker.ago = ago

    return hear


@pytest.mark.parametrize(
    ("ago", "said"), [(1.0, False), (health.STALE_S + 5, True), ("", True), (None, False)]
)
def test_no_worker_is_said_on_list_run_and_replica(
    client: Client, olga: Any, heard: Any, ago: Any, said: bool
) -> None:
    heard(ago)
    run = seed.run(olga, committed=1, replicas=1)
    assert silent(client.get("/").content.decode()) == said
    assert silent(client.get(f"/runs/{run.pk}/").content.decode()) == said
    replica = f"/runs/{run.pk}/replicas/0/"
    assert silent(client.get(replica).content.decode()) == said
    moves = client.get(f"{replica}?part=1").content.decode()
    assert ('data-silent="no"' not in moves) == said
    for path in ("/runs.json", f"/runs/{run.pk}/snapshot.json"):
        assert (client.get(path).json()["silent_since"] is not None) == said


def test_a_run_that_is_over_needs_no_worker(client: Client, olga: Any, heard: Any) -> None:
    heard("")
    run = seed.run(olga, committed=1, replicas=1, state="succeeded")
    assert not silent(client.get(f"/runs/{run.pk}/").content.decode())
    assert client.get(f"/runs/{run.pk}/snapshot.json").json()["silent_since"] is None


def test_when_a_worker_was_last_heard_of() -> None:
    now = timezone.now()
    assert health.since(None, now=now) == ""
    assert health.since(str(now.timestamp() - 1).encode(), now=now) is None
    at = now - timedelta(seconds=health.STALE_S + 1)
    assert health.since(str(at.timestamp()).encode(), now=now) == at.isoformat()


def test_runs_that_say_nothing_are_marked(client: Client, olga: Any, heard: Any) -> None:
    heard(1.0)
    old = timezone.now() - timedelta(seconds=health.STALE_RUN_S + 5)
    for name, state in (("a", "running"), ("b", "running"), ("c", "succeeded")):
        seed.run(olga, name=name, committed=1, replicas=1, state=state)
    Run.objects.update(last_seen_at=timezone.now())
    Run.objects.filter(name__in=("a", "c")).update(last_seen_at=old)
    answer = client.get("/?sort=name")
    assert [row["stale"] for row in answer.context["rows"]] == [True, False, False]
    page = answer.content.decode()
    assert re.search(r'data-banner="stale"[^>]*status">', page)
    assert "<span data-n>1</span> silent" in page
    for name, hidden in (("a", False), ("b", True)):
        for place in ("", "replicas/0/"):
            page = client.get(f"/runs/{Run.objects.get(name=name).pk}/{place}").content.decode()
            assert bool(re.search(r'data-banner="stale"[^>]* hidden>', page)) == hidden
