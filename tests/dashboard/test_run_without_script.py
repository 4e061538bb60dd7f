"""The run page without JavaScript: every tab has its content in ``<noscript>`` or as it is."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from dashboard.views.run import TABS
from runs.models import Replica, Run
from runs.queries import plain_lists
from tests.browser import seed

pytestmark = pytest.mark.django_db

CONTENT = {
    "overview": ("replica 1", "All replicas with state and reason"),
    "rounds": ('<th scope="row">9</th>', "round 9 was void", "below=9"),
    "timeline": ('<th scope="row">9</th>', "Since the round before", "7.5 s"),
    "replicas": ("CPU of this machine", "Replica 1</a>", "lost its host", "above=1"),
    "system": ("Replica 1</a>", "GPU memory", "1.50 GB", "above=1"),
    "logs": ("upload retried once", "logs.txt"),
}
"""Texts in the ``<noscript>`` of each tab; the server renders the other tabs as they are."""


@pytest.fixture
def run(operator_user: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(plain_lists, "MOST", 2)
    run: Run = seed.run(operator_user, committed=9, replicas=3)
    run.rounds.filter(number=9).update(reason="round 9 was void <b>why")
    changes = {"state_reason": "lost its host", "gpu_memory_bytes": 1.5e9}
    Replica.objects.filter(run=run, number=1).update(**changes)
    return run


def without_script(client: Client, run: Run, query: str) -> tuple[str, int]:
    """The contents of the ``<noscript>`` elements of a page, and its number of queries."""
    with CaptureQueriesContext(connection) as queries:
        text = client.get(reverse("run", args=[run.pk]) + query).content.decode()
    return "\n".join(re.findall(r"<noscript>(.*?)</noscript>", text, re.DOTALL)), len(queries)


def test_every_tab_can_be_read(client: Client, run: Run) -> None:
    plain = {tab: without_script(client, run, f"?tab={tab}") for tab in TABS}
    fewest = plain["settings"][1]
    for tab, (text, queries) in plain.items():
        assert [word for word in CONTENT.get(tab, ()) if word not in text] == [], tab
        assert "<b>why" not in text, tab
        assert queries <= fewest + 1, tab
        assert ("<table" in text) == (tab in ("rounds", "timeline", "replicas", "system")), tab


def test_lists_continue_on_further_pages(client: Client, run: Run) -> None:
    text, _ = without_script(client, run, "?tab=rounds&below=2")
    assert '<th scope="row">1</th>' in text
    assert "below=" not in text
    text, _ = without_script(client, run, "?tab=replicas&above=1")
    assert "Replica 2</a>" in text
    assert "Replica 1</a>" not in text
    assert "above=" not in text
    for query in (
        "?tab=rounds&below=x",
        f"?tab=replicas&above={'9' * 19}",
        f"?tab=logs&line=²&replica={'1' * 5000}&q=%00",
    ):
        assert without_script(client, run, query)[0]
    text, _ = without_script(client, run, "?tab=logs&replica=1&q=upload")
    assert set(re.findall(r"<span>(replica \d)</span>", text)) == {"replica 1"}


def test_the_dots_of_many_replicas_are_links(
    client: Client, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dashboard.views.run.DENSE_RAIL", 2)
    page = reverse("run", args=[run.pk])
    rail = re.search(r"<ol class=\"rail-replicas\".*?</ol>", client.get(page).content.decode())
    assert rail is not None
    links = re.findall(r'<a href="([^"]+)" title="Replica \d: ', rail[0])
    assert [page + link for link in links] == [
        reverse("replica", args=[run.pk, n]) for n in range(3)
    ]


def test_the_time_since_the_round_before_needs_that_round(client: Client, run: Run) -> None:
    run.rounds.filter(number=8).delete()
    assert "7.5 s" not in without_script(client, run, "?tab=rounds")[0]
