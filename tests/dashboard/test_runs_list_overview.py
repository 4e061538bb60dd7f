"""The runs list: reasons of failures, amounts with unknown parts, tags, tabs and totals."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from django.test import Client

from archipelago.rows import RunTotals
from runs.models import ReplicaAttempt, ReplicaPool, Run
from tests.browser import seed
from tests.browser.seed_prices import priced, unpriced
from tests.dashboard.page_harness import client_for

pytestmark = pytest.mark.django_db


@pytest.fixture
def client(operator_user: Any) -> Client:
    return client_for("owner", operator_user)


def row(client: Client, run: Run, query: str = "") -> str:
    page = client.get(f"/{query}").content.decode()
    return page[page.index(f'data-run="{run.pk}"') :].split("</tr>")[0]


def cell(text: str, name: str) -> str:
    found = re.search(rf'data-f="{name}"[^>]*>([^<]*)<', text)
    assert found is not None
    return found[1]


def partly_priced(owner: Any) -> Run:
    run = priced(seed.run(owner, committed=1, replicas=2), 3.0)
    ReplicaAttempt.objects.filter(replica__run=run, replica__number=1).update(
        price_usd_h=None, cost_usd=None
    )
    ReplicaPool.objects.create(run=run, backend="vast", count=1, price_usd_h=None)
    Run.objects.filter(pk=run.pk).update(cost_usd=12.35)
    return run


def test_a_cost_with_unknown_parts_is_a_lower_bound(client: Client, operator_user: Any) -> None:
    text = row(client, partly_priced(operator_user))
    assert cell(text, "cost") == "$12.35 +"
    assert cell(text, "rate") == "$3.00 +"


def test_a_cost_without_a_known_part_is_unknown(client: Client, operator_user: Any) -> None:
    run = unpriced(seed.run(operator_user, committed=1, replicas=1))
    assert cell(row(client, run), "cost") == "unknown"


def test_only_a_failed_run_shows_its_reason(client: Client, operator_user: Any) -> None:
    reason = "bucket <17>: access denied\n" + "x" * 5000
    failed = seed.run(operator_user, state="failed", committed=0, replicas=1, reason=reason)
    degraded = seed.run(operator_user, state="degraded", committed=1, replicas=1, reason=reason)
    link = rf'<a class="why" href="/runs/{failed.pk}/" data-f="why">([^<]*)</a>'
    shown = re.search(link, row(client, failed))
    assert shown is not None
    assert shown[1].startswith("bucket &lt;17&gt;: access denied\nxxx")
    assert 900 < len(shown[1]) < 1100
    Run.objects.update(
        state_reason="replica 1: ended. Last lines of its log:\nstep 7\nIndexError: x"
    )
    assert ">replica 1: ended. IndexError: x</a>" in row(client, failed)
    Run.objects.update(state_reason=reason)
    assert 'data-f="why" hidden></a>' in row(client, degraded)


def test_the_first_tags_are_shown_and_the_others_counted(
    client: Client, operator_user: Any
) -> None:
    run = seed.run(operator_user, committed=1, replicas=1)
    Run.objects.filter(pk=run.pk).update(tags=list("abcdef"))
    tags = re.findall(r'<i class="tag"([^>]*)>([^<]+)', row(client, run))
    assert [text for _, text in tags] == ["a", "b", "c", "d", "+2"]
    assert tags[-1][0] == ' title="e f"'
    assert '<i class="tag">a' not in row(client, run, "?columns=cost")


def test_tabs_keep_the_other_terms(client: Client, operator_user: Any) -> None:
    seed.run(operator_user, committed=1, replicas=1)
    page = client.get("/?q=is:mine+rate>=0&sort=-cost").content.decode()
    nav = page[page.index('class="list-tabs"') :].split("</nav>")[0]
    links = re.findall(r'href="([^"]*)"( aria-current="page")?>(\w+)', nav)
    assert [(label, bool(current)) for _, current, label in links] == [
        ("Active", False),
        ("Mine", True),
        ("Failed", False),
        ("All", False),
    ]
    assert links[2][0] == "?q=rate%3E%3D0+state%3Afailed&amp;sort=-cost"
    assert links[3][0] == "?q=rate%3E%3D0&amp;sort=-cost"


def test_totals_are_texts_by_name(client: Client, operator_user: Any) -> None:
    partly_priced(operator_user)
    failed = seed.run(operator_user, state="failed", committed=1, replicas=1)
    priced(failed, 1.0)
    texts = client.get("/runs/totals").json()
    assert texts.pop("today").endswith(" +")
    assert texts == {
        "active": "1",
        "mine": "2",
        "failed": "1",
        "all": "2",
        "active_runs": "1",
        "gpus": "0 GPUs",
        "rate": "$3.00 +",
        "alerts": "0 alerts",
        "runs": "2 runs",
        "cost": "$12.35 +",
    }
    assert client.get("/runs/totals?q=state:failed").json()["runs"] == "1 run"
    assert client.get("/runs/totals?q=state:failed").json()["rate"] == "–"
    assert client.get("/runs/totals?q=los<3").status_code == 422
    without_role = client_for("stranger", operator_user)
    without_role.force_login(seed.user("without-role", ""))
    assert without_role.get("/runs/totals").json() == {}


def test_without_a_script_the_page_can_show_totals(client: Client, operator_user: Any) -> None:
    partly_priced(operator_user)
    assert '<b data-total="cost"></b>' in client.get("/").content.decode()
    page = client.get("/?totals=1").content.decode()
    assert '<b data-total="cost">$12.35 +</b> spent in all' in page
    assert '<b data-total="active_runs">1</b> active' in page
    assert 'data-total="mine">1<' in page
    assert client.get("/?totals=1&q=los<3").status_code == 422


def test_figures_link_to_their_pages(client: Client, operator_user: Any) -> None:
    seed.run(operator_user, committed=1, replicas=1)

    def links(query: str) -> list[str]:
        page = client.get(f"/?{query}").content.decode()
        strip = page[page.index('class="totals"') :].split("</ul>")[0]
        assert strip.count("<li title=") == 7
        return re.findall(r'href="([^"]*)"', strip)

    assert links("") == ["?q=is%3Aactive", "/fleet", "/fleet", "/spend?days=1", "/alerts"]
    name = operator_user.get_username()
    assert links("q=is:mine+loss<3")[1:] == [
        f"/fleet?owner={name}",
        f"/fleet?owner={name}",
        f"/spend?days=1&amp;owner={name}",
        f"/alerts?owner={name}",
    ]
    assert links("q=owner:anna")[4] == "/alerts?owner=anna"
    assert links(f"q=owner:{name.upper()}")[4] == f"/alerts?owner={name}"
    for query in ("-owner:anna", "owner:anna,ben", "-is:mine"):
        assert links(f"q={query}")[4] == "/alerts"


def test_the_api_has_the_totals_of_all_pages(client: Client, operator_user: Any) -> None:
    for name in ("hot", "cold"):
        priced(seed.run(operator_user, name=name, committed=1, replicas=2), 4.0)
    page = client.get("/api/runs", {"limit": 1, "totals": True, "owner": "olga"}).json()
    assert len(page["runs"]) == 1
    assert set(page["totals"]) == {field.name for field in dataclasses.fields(RunTotals)}
    assert (page["totals"]["runs"], page["totals"]["usd_h"]) == (2, 16.0)
    for filters in ({"name": "hot"}, {"q": "name:hot"}):
        totals = client.get("/api/runs", {**filters, "totals": True}).json()["totals"]
        assert (totals["runs"], totals["usd_h"]) == (1, 8.0)
    assert client.get("/api/runs").json()["totals"] is None


def test_the_api_takes_the_same_query(client: Client, operator_user: Any) -> None:
    hot = priced(seed.run(operator_user, name="hot", committed=1, replicas=4), 4.0)
    priced(seed.run(operator_user, name="cold", committed=1, replicas=1), 4.0)
    runs = client.get("/api/runs", {"q": "rate>10"}).json()["runs"]
    assert [run["id"] for run in runs] == [str(hot.pk)]
    assert (runs[0]["usd_h"], runs[0]["usd_h_known"]) == (16.0, True)
    assert client.get("/api/runs", {"q": "cost>100"}).json()["runs"] == []
