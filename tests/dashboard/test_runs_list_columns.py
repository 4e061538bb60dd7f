"""The runs list: columns, differing settings, and marks of outdated values."""

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
from tests.dashboard.page_harness import make_runs

pytestmark = pytest.mark.django_db


def heads(page: str) -> list[str]:
    result = re.findall(r'role="columnheader"[^>]*>(?:<a[^>]*>)?([^<]*)', page)
    return [head for head in result if head]


def labels(page: str) -> list[str]:
    """Labels of the first card, the layout below 720 px."""
    return re.findall(r'data-label="([^"]+)"', page[page.index("data-run=") :].split("</tr>")[0])


def test_default_columns_are_left_out_of_the_url(client: Client, operator_user: Any) -> None:
    seed.run(operator_user, committed=1, replicas=1)
    page = client.get("/").content.decode()
    assert heads(page) == [
        "State",
        "Run",
        "Replicas",
        "Rounds",
        "Eval loss",
        "Train loss",
        "Tokens",
        "Tokens/s",
        "Goodput",
        "Cost",
        "$/h",
        "Started",
        "Ran for",
    ]
    assert "columns=" not in "".join(re.findall(r'href="([^"]*)"', page))


def test_every_column_can_be_shown_alone_in_table_and_cards(
    client: Client, operator_user: Any
) -> None:
    run = seed.run(operator_user, committed=1, replicas=1)
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
        under = re.sub(r"<[^>]+>", "", row.split('class="sub"')[1].split("</th>")[0])
        for name, text in below.items():
            assert (text in under) == (name == column.name)


def test_columns_can_come_from_a_form_or_a_link(client: Client, operator_user: Any) -> None:
    seed.run(operator_user, committed=1, replicas=1)
    by_form = client.get("/?columns=name&columns=cost&columns=loss&differ=1&sort=-cost")
    assert str(by_form.context["here"]) == "?sort=-cost&columns=name,loss,cost&differ=1"
    by_link = client.get(f"/{by_form.context['here']}")
    assert heads(by_form.content.decode()) == heads(by_link.content.decode())
    assert by_link.context["here"] == by_form.context["here"]


def test_columns_persist_across_sort_filter_and_pages(client: Client, operator_user: Any) -> None:
    seed.run(operator_user, committed=1, replicas=1)
    page = client.get("/?q=state:running&columns=name,loss&facets=1").content.decode()
    addresses = re.findall(r'href="(\?[^"]*)"', page)
    assert len(addresses) > 5
    usual = [a for a in addresses if "columns=name,loss" not in a]
    assert usual == ["?q=state%3Arunning"]  # the reset link
    assert '<input type="hidden" name="columns" value="name,loss">' in page
    assert 'name="columns" value="loss" checked' in page
    assert 'name="columns" value="cost" checked' not in page


@pytest.mark.parametrize("columns", ["", "nonsense", ",", "<script>"])
def test_unknown_columns_fall_back_to_the_default(
    client: Client, operator_user: Any, columns: str
) -> None:
    response = client.get("/", {"columns": columns})
    assert response.context["shown"] == table.DEFAULT
    assert "<script>" not in response.content.decode()


def test_every_column_order_is_valid() -> None:
    assert {column.sort for column in table.COLUMNS if column.sort} == set(SORTS)


def test_differing_settings_of_the_shown_runs(client: Client, operator_user: Any) -> None:
    for name, sync_every in (("a", 40), ("b", 80), ("c", 80)):
        seed.run(operator_user, name=name, committed=1, replicas=1, sync_every=sync_every)
    Run.objects.filter(name="a").update(budget_usd=5)  # a limit is not a group setting
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
    assert "There is only one run to compare" in client.get("/?differ=1&q=name:a").content.decode()
    assert "c-differ" not in client.get("/").content.decode()


def test_settings_missing_in_older_runs_count_as_differing(
    client: Client, operator_user: Any
) -> None:
    one = seed.run(operator_user, name="a", committed=1, replicas=1)
    seed.run(operator_user, name="b", committed=1, replicas=1)
    settings = dict(one.group_settings)
    del settings["outer_lr"]
    Run.objects.filter(pk=one.pk).update(group_settings=settings)
    page = client.get("/?differ=1").content.decode()
    assert "settings.outer_lr" in page


def test_the_number_of_differing_settings_is_limited(
    client: Client, operator_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "MOST_DIFFERING", 1)
    seed.run(operator_user, name="a", committed=1, replicas=1, sync_every=10)
    seed.run(operator_user, name="b", committed=1, replicas=1, sync_every=20, total_rounds=500)
    page = client.get("/?differ=1").content.decode()
    assert page.count('<th scope="col" role="columnheader" class="num c-differ"') == 1
    assert re.search(r"the comparison shows \d more", page)


def test_differing_settings_need_no_query(client: Client, operator_user: Any) -> None:
    for name in "abcd":
        seed.run(operator_user, name=name, committed=1, replicas=2, sync_every=10 * ord(name))

    def count_queries(address: str) -> int:
        with CaptureQueriesContext(connection) as queries:
            client.get(address)
        return len(queries)

    assert count_queries("/?differ=1") == count_queries("/")


def test_list_addresses_round_trip() -> None:
    for text in ("?", "?q=a+b&sort=-loss", "?columns=state,name&differ=1", "?q=tag%3Ax%26y"):
        assert str(ListAddress.of_text(text)) == text


# Outdated values are marked.


def silent(page: str) -> bool:
    result = re.search(r'data-banner="silent"[^>]*>', page)
    assert result
    return "hidden" not in result[0]


@pytest.fixture
def set_heartbeat(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the worker heartbeat: age in seconds, '' for none, None for a broker that is down."""

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
    ("ago", "output"), [(1.0, False), (health.STALE_S + 5, True), ("", True), (None, False)]
)
def test_a_missing_worker_is_shown_on_all_pages(
    client: Client, operator_user: Any, set_heartbeat: Any, ago: Any, output: bool
) -> None:
    set_heartbeat(ago)
    run = seed.run(operator_user, committed=1, replicas=1)
    assert silent(client.get("/").content.decode()) == output
    assert silent(client.get(f"/runs/{run.pk}/").content.decode()) == output
    replica = f"/runs/{run.pk}/replicas/0/"
    assert silent(client.get(replica).content.decode()) == output
    moves = client.get(f"{replica}?part=1").content.decode()
    assert ('data-silent="no"' not in moves) == output
    for path in ("/runs.json", f"/runs/{run.pk}/snapshot.json"):
        assert (client.get(path).json()["silent_since"] is not None) == output


def test_ended_runs_need_no_worker(client: Client, operator_user: Any, set_heartbeat: Any) -> None:
    set_heartbeat("")
    run = seed.run(operator_user, committed=1, replicas=1, state="succeeded")
    assert not silent(client.get(f"/runs/{run.pk}/").content.decode())
    assert client.get(f"/runs/{run.pk}/snapshot.json").json()["silent_since"] is None


def test_time_of_the_last_worker_heartbeat() -> None:
    now = timezone.now()
    assert health.since(None, now=now) == ""
    assert health.since(str(now.timestamp() - 1).encode(), now=now) is None
    at = now - timedelta(seconds=health.STALE_S + 1)
    assert health.since(str(at.timestamp()).encode(), now=now) == at.isoformat()


def test_silent_runs_are_marked_as_stale(
    client: Client, operator_user: Any, set_heartbeat: Any
) -> None:
    set_heartbeat(1.0)
    old = timezone.now() - timedelta(seconds=health.STALE_RUN_S + 5)
    for name, state in (("a", "running"), ("b", "running"), ("c", "succeeded")):
        seed.run(operator_user, name=name, committed=1, replicas=1, state=state)
    Run.objects.update(last_seen_at=timezone.now(), tokens_per_s=1234.0, round_s=10.0)
    Run.objects.filter(name__in=("a", "c")).update(last_seen_at=old)
    response = client.get("/?sort=name&columns=state,name,speed")
    assert [row.stale for row in response.context["rows"]] == [True, False, False]
    page = response.content.decode()
    assert re.findall(r'data-f="tokens_per_s">([^<]*)<', page) == ["–", "1,234", "–"]
    by_name = {run["name"]: run for run in client.get("/runs.json").json()["runs"]}
    assert [by_name[n]["tokens_per_s"] for n in "ab"] == [None, 1234.0]
    assert by_name["a"]["eta_s"] is None
    assert by_name["b"]["eta_s"] > 0
    assert re.search(r'data-banner="stale"[^>]*status">', page)
    assert "<span data-n>1</span> silent" in page
    for name, hidden in (("a", False), ("b", True)):
        for place in ("", "replicas/0/"):
            page = client.get(f"/runs/{Run.objects.get(name=name).pk}/{place}").content.decode()
            assert bool(re.search(r'data-banner="stale"[^>]* hidden>', page)) == hidden


@pytest.mark.parametrize("path", ["/?differ=1", "/compare?ids={}"])
def test_damaged_columns_break_no_page(client: Client, operator_user: Any, path: str) -> None:
    runs = make_runs(operator_user, 2)
    type(runs[0]).objects.filter(pk=runs[0].pk).update(group_settings=[1], workload="x")
    response = client.get(path.format(",".join(str(run.pk) for run in runs)))
    assert response.status_code == 200
