"""The run page and its JSON."""

from __future__ import annotations

import gzip
import json
import re
from html import unescape
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from diloco.protocol.settings import setting_fields
from runs.models import Event, LogLine, ReplicaAttempt, Run
from runs.queries import selectors
from tests.browser import seed
from tests.browser.seed_prices import unpriced

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(client: Client) -> Run:
    operator_user = seed.user("olga", "operator")
    client.force_login(operator_user)
    return seed.run(operator_user, committed=10, replicas=3)


def page(client: Client, run: Run, query: str = "") -> str:
    return client.get(reverse("run", args=[run.pk]) + query).content.decode()


def test_settings_are_values_and_never_inputs(client: Client, run: Run) -> None:
    text = page(client, run, "?tab=settings")
    panel = text[text.index('data-panel="settings"') : text.index('data-panel="activity"')]
    assert not re.search(r"<(input|select|textarea)\b", panel)
    for spec in setting_fields():
        assert spec.label in panel
    assert run.group_fingerprint in panel
    assert "group.json" in panel


def test_settings_show_the_meaning_of_zero_and_changes(client: Client, run: Run) -> None:
    chosen = {"max_tokens": 0, "grad_clip": 0.0, "sync_every": 90, "outer_lr": 0.7, "min_quorum": 1}
    Run.objects.update(group_settings={**run.group_settings, **chosen})
    text = page(client, run, "?tab=settings")
    facts = dict(re.findall(r"<dt title[^>]*>([^<]+)</dt><dd>(.*?)</dd>", text))
    assert facts["Token limit"] == "no limit"
    assert facts["Gradient clip"] == '<b title="The default is 1.">none</b>'
    assert facts["Local steps (H)"].startswith('<b title="The default is 50.">90</b> ')
    assert facts["Outer learning rate"] == "0.7"
    assert re.search(r">1(</b>)? <span class=\"muted\">replica<", f">{facts['Minimum quorum']}")


@pytest.mark.parametrize("tab", ["overview", "rounds", "logs", "nonsense", ""])
def test_the_url_selects_the_tab(client: Client, run: Run, tab: str) -> None:
    shown = re.findall(r'data-panel="(\w+)" aria-label="\w+">', page(client, run, f"?tab={tab}"))
    assert shown == [tab if tab in ("overview", "rounds", "logs") else "overview"]


def test_tags_link_to_the_runs_that_have_them(client: Client, run: Run) -> None:
    Run.objects.update(tags=["paper", '1"x&y'])
    links = re.findall(r'<a class="tag" href="([^"]*)"', page(client, run))
    assert len(links) == 2
    for link in links:
        rows = client.get(unescape(link)).context["rows"]
        assert [row.header["name"] for row in rows] == [run.name]


def test_the_log_has_the_filters_of_the_address(client: Client, run: Run) -> None:
    text = page(client, run, "?tab=logs&q=%22x&level=error")
    assert 'value="&quot;x" data-find' in text
    assert text.count('<option value="error" selected>') == 2
    assert 'value="&quot;x"' not in page(client, run, "?q=%22x")


def test_names_and_reasons_are_text(client: Client, run: Run) -> None:
    Run.objects.update(name="</title><script>x", state_reason="<b>why</b>")
    text = page(client, run)
    assert "<script>x" not in text
    assert "<b>why" not in text


def test_snapshot_is_compressed(client: Client, run: Run) -> None:
    url = reverse("run-snapshot", args=[run.pk])
    plain, packed = client.get(url), client.get(url, headers={"accept-encoding": "gzip"})
    assert packed["Content-Encoding"] == "gzip"
    unpacked, body = json.loads(gzip.decompress(packed.content)), plain.json()
    assert unpacked["rounds"] == body["rounds"]
    assert len(packed.content) < len(plain.content) / 2


def test_cost_without_javascript_is_that_of_the_list(client: Client, run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(cost_usd=12.345)
    unpriced(run)
    for price, shown in ((None, "$12.35 +"), (1.0, "$12.35")):
        ReplicaAttempt.objects.filter(replica__run=run).update(price_usd_h=price)
        cost = re.search(
            r'data-s="cost">([^<]*)</b> <span data-s="budget">([^<]*)', page(client, run)
        )
        assert cost is not None
        assert cost.groups() == (shown, "spent")


def test_snapshot_has_what_the_store_reads(client: Client, run: Run) -> None:
    body = client.get(reverse("run-snapshot", args=[run.pk])).json()
    assert set(body) >= {"run", "replicas", "rounds", "events", "points", "cursor"}
    assert body["run"]["committed_rounds"] == 10
    assert [r["number"] for r in body["replicas"]] == [0, 1, 2]
    assert {(p["series"], p["replica"]) for p in body["points"]} >= {
        ("loss", 0),
        ("eval_loss", None),
    }


def test_log_lines_by_replica_and_from_an_id_on(client: Client, run: Run) -> None:
    url = reverse("run-logs", args=[run.pk])
    everything = client.get(url).json()["lines"]
    assert [line["id"] for line in everything] == sorted(line["id"] for line in everything)
    assert {line["replica"] for line in client.get(url, {"replica": 1}).json()["lines"]} == {1}
    assert client.get(url, {"after": everything[-1]["id"]}).json()["lines"] == []
    assert client.get(url, {"after": "x"}).status_code == 400


def test_stop_is_idempotent(client: Client, run: Run) -> None:
    url = reverse("run-stop", args=[run.pk])
    assert client.get(url).status_code == 405
    client.post(url)
    run.refresh_from_db()
    assert run.state == "stopping"
    again: Any = client.post(url, follow=True)
    assert "is already" in again.content.decode()
    assert Event.objects.filter(run=run, to_state="stopping").count() == 1


def lines(client: Client, run: Run, **query: Any) -> list[dict[str, Any]]:
    response = client.get(reverse("run-logs", args=[run.pk]), query)
    assert response.status_code == 200, response.content
    result: list[dict[str, Any]] = response.json()["lines"]
    return result


def test_log_lines_are_searched_by_the_server(client: Client, run: Run) -> None:
    result = lines(client, run, q="UPLOAD retried")
    assert {line["message"] for line in result} == {"upload retried once: store answered slowly"}
    assert len(result) == 3
    assert len(lines(client, run, q="upload retried", replica=1)) == 1
    assert lines(client, run, q="%_\x00nowhere") == []


def test_log_lines_of_a_level_and_worse(client: Client, run: Run) -> None:
    replica = run.replicas.first()
    for level in ("ERROR", "critical"):
        LogLine.objects.create(
            replica=replica, incarnation="x", at=run.created_at, level=level, message=level
        )
    assert {line["level"] for line in lines(client, run, level="warning")} == {
        "warning",
        "ERROR",
        "critical",
    }
    assert {line["level"] for line in lines(client, run, level="error")} == {"ERROR", "critical"}
    assert len(lines(client, run, level="nonsense")) == len(lines(client, run))


def test_lines_around_a_line(client: Client, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dashboard.views.run.MAX_LOG_LINES", 4)
    every = [line["id"] for line in selectors.log_rows(run, limit=100)]
    assert [line["id"] for line in lines(client, run, line=every[4])] == every[3:7]
    assert [line["id"] for line in lines(client, run)] == every[-4:]
    response = client.get(reverse("run-logs", args=[run.pk]), {"line": "9" * 30})
    assert response.status_code == 400


def test_the_roles_of_the_user_are_read_once(
    client: Client, run: Run, django_assert_max_num_queries: Any
) -> None:
    with django_assert_max_num_queries(40) as queries:
        page(client, run)
    assert sum("auth_user_groups" in one["sql"] for one in queries.captured_queries) == 1
