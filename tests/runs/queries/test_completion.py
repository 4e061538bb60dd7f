"""Completions of the last term of a query, and the similar term of an invalid one."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from runs.models import Run
from runs.queries import completion, search
from runs.queries.search import BadQuery
from tests.browser import seed


@pytest.mark.parametrize(
    ("query", "similar"),
    [
        ("stat:running", "state:running"),
        ("-onwer:olga", "-owner:olga"),
        ("los<3", "loss<3"),
        ("name loos<3", "loss<3"),
        ("state:runing", "state:running"),
        ("state:failed,cancled", "state:failed,cancelled"),
        ("is:activ", "is:active"),
        ("tag=x owner<x", "owner:x"),
        ("xyzzy:3", ""),
    ],
)
def test_an_invalid_term_has_a_similar_valid_one(query: str, similar: str) -> None:
    with pytest.raises(BadQuery) as caught:
        search.parse(query)
    error = caught.value
    assert error.similar == similar
    assert (f"Did you mean {similar}?" in str(error)) == bool(similar)
    if similar:
        search.parse(search.corrected(query, error))
    else:
        assert search.corrected(query, error) == ""


def test_every_field_has_a_help_text() -> None:
    assert set(completion.HELP) == set(search.FIELDS)


@pytest.fixture
def user(db: None) -> Any:
    olga = seed.user("olga", "operator")
    seed.run(olga, name="First", replicas=1, committed=0)
    seed.run(olga, name="Second run", replicas=1, committed=0)
    Run.objects.filter(name="First").update(tags=["paper", "a b", '1"'])
    Run.objects.filter(name="Second run").update(tags=["paper"])
    return olga


COMPLETIONS: dict[str, list[str]] = {
    "st": ["state:"],
    "state:failed -ow": ["state:failed -owner:"],
    "lo": ["loss<"],
    "stae": ["state:"],
    "state:ru": ["state:running "],
    "state:failed,canc": ["state:failed,cancelled "],
    "state:runing": ["state:running "],
    "tag:": ["tag:paper ", 'tag:"a b" ', 'tag:"1""" '],
    'tag:"1""': ['tag:"1""" '],
    'tag:"a': ['tag:"a b" ', "tag:paper "],
    "is:mi": ["is:mine "],
    "owner:OL": ["owner:olga "],
    "name:sec": ['name:"Second run" '],
    "hardware:zz": [],
    "loss<3": [],
    "xyzzy": [],
    "tag:\x00": [],
    "a" * 600: [],
}


def test_completions(user: Any) -> None:
    for text, queries in COMPLETIONS.items():
        assert [each.query for each in completion.completions(user, text)] == queries, text


def test_a_quoted_term_before_the_last_one_is_complete(user: Any) -> None:
    for before in ('tag:"a b" ', 'name:"big run" -', 'owner:"x y" state:running '):
        found = completion.completions(user, f"{before}stat")
        assert [each.query for each in found] == [f"{before}state:"], before
    assert completion.completions(user, 'name:"big run" ')[0].query.startswith('name:"big run" ')


def test_completions_are_limited_and_counted(user: Any) -> None:
    assert len(completion.completions(user, "")) == completion.LIMIT
    assert completion.completions(user, "tag:pap")[0].runs == 2
    assert completion.completions(User.objects.create_user("nora"), "st") == []


def test_page_and_api_return_the_same(user: Any) -> None:
    Client.force_login(client := Client(), user)
    for path in ("/runs/complete.json", "/api/runs/complete"):
        [row] = client.get(path, {"q": "owner:"}).json()["completions"]
        assert row == {"label": "olga", "query": "owner:olga ", "help": "", "runs": 2}


def test_the_page_offers_the_similar_query(user: Any) -> None:
    Client.force_login(client := Client(), user)
    page = client.get("/?q=stat:running+tag:paper&sort=name").content.decode()
    assert 'href="?q=state%3Arunning+tag%3Apaper&amp;sort=name"' in page
    assert "Did you mean state:running?" in page
