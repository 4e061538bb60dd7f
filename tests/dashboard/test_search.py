"""The search of every page: what it finds, and what it offers to each role."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from dashboard.presentation import palette
from runs.models import Run
from runs.queries.fuzzy import score, words_of
from runs.states import RunState
from tests.browser import seed
from tests.dashboard.page_harness import make_runs

pytestmark = pytest.mark.django_db


@pytest.fixture
def run() -> Run:
    return seed.run(seed.user("olga", "operator"), name="Five backends", replicas=4, committed=1)


def found(client: Client, text: str, **query: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = client.get(reverse("search-json"), {"q": text, **query}).json()[
        "found"
    ]
    return rows


def labels(client: Client, text: str, **query: str) -> list[str]:
    return [row["label"] for row in found(client, text, **query)]


@pytest.mark.parametrize(
    ("text", "name", "matches"),
    [
        ("five", "Five backends", True),
        ("back five", "Five backends", True),
        ("fvbk", "Five backends", True),
        ("fb", "Five backends", False),
        ("nothing", "Five backends", False),
        ("", "Five backends", True),
    ],
)
def test_words_match_names(text: str, name: str, matches: bool) -> None:
    assert (score(words_of(text), name) is not None) is matches


def test_a_better_match_scores_higher() -> None:
    names = ["Deep run", "Rundown", "A prune", "Ru-n"]
    ranked = sorted(names, key=lambda name: -(score(["run"], name) or 0))
    assert ranked == ["Rundown", "Deep run", "A prune", "Ru-n"]


def test_runs_are_found_by_name_owner_and_id(client: Client, run: Run) -> None:
    client.force_login(seed.user("vera", "viewer"))
    for text in ("five", "BACK five", "olga", str(run.pk)[:8], "fvbk"):
        assert "Five backends" in labels(client, text), text
    assert labels(client, "no such thing") == []
    assert labels(client, "five\x00") and client.get(reverse("search"), {"q": "five"})


def test_a_number_finds_a_replica(client: Client, run: Run) -> None:
    client.force_login(seed.user("vera", "viewer"))
    row = found(client, "five 3")[0]
    assert (row["kind"], row["label"], row["detail"]) == ("replica", "Replica 3", "Five backends")
    assert row["url"] == reverse("replica", args=[run.pk, 3])
    assert "Replica 2" in labels(client, "replica 2", run=str(run.pk))
    assert "Replica 9" not in labels(client, "five 9")
    assert labels(client, "five 99999999999999999") == []


def test_actions_depend_on_the_role_and_the_state(client: Client, run: Run) -> None:
    client.force_login(run.owner)
    assert labels(client, "stop five")[0] == "Stop Five backends"
    assert labels(client, "clone five")[0] == "Clone Five backends"
    assert "Resume Five backends" not in labels(client, "resume five")
    Run.objects.update(state=RunState.PAUSED)
    assert labels(client, "resume five")[0] == "Resume Five backends"
    Run.objects.update(state=RunState.SUCCEEDED)
    assert "Stop Five backends" not in labels(client, "stop five")
    for name, role, clones in (("vera", "viewer", False), ("oscar", "operator", True)):
        client.force_login(seed.user(name, role))
        assert "Stop Five backends" not in labels(client, "stop five")
        assert ("Clone Five backends" in labels(client, "clone five")) is clones


def test_the_actions_on_the_run_of_the_page_come_first(client: Client, run: Run) -> None:
    client.force_login(run.owner)
    assert labels(client, "", run=str(run.pk))[0] == "Stop Five backends"
    assert labels(client, "sto", run=str(run.pk))[0] == "Stop Five backends"
    assert labels(client, "", run="no id")


def test_pages_depend_on_the_role(client: Client) -> None:
    client.force_login(seed.user("vera", "viewer"))
    assert labels(client, "spend")[0] == "Spend"
    assert labels(client, "money")
    assert "Credentials" not in labels(client, "credentials")
    assert "New run" not in labels(client, "new run")
    client.force_login(seed.user("root", "admin"))
    assert labels(client, "credentials")[0] == "Credentials"
    assert labels(client, "new run")[0] == "New run"


def test_the_work_is_bounded(client: Client, run: Run) -> None:
    root = seed.user("root", "admin")
    make_runs(root, 5)
    with CaptureQueriesContext(connection) as few:
        palette.entries(root, "stop r 3", run_id=str(run.pk))
    make_runs(root, 30)
    root.refresh_from_db()  # as in a new request, whose roles are not read yet
    with CaptureQueriesContext(connection) as many:
        rows = palette.entries(root, "stop r 3", run_id=str(run.pk))
    assert len(many) == len(few)
    assert len(rows) <= palette.LIMIT


def test_the_page_works_without_javascript(client: Client, run: Run) -> None:
    client.force_login(run.owner)
    page = client.get(reverse("search"), {"q": "stop five"}).content.decode()
    address = reverse("run-do", args=[run.pk, "stop"])
    assert f'href="{address}"' in page
    confirm = client.get(address).content.decode()
    assert f'action="{reverse("run-stop", args=[run.pk])}"' in confirm
    assert client.get(reverse("run-do", args=[run.pk, "explode"])).status_code == 404
    Run.objects.update(state=RunState.SUCCEEDED)
    assert "does not allow this" in client.get(address).content.decode()
    client.force_login(seed.user("oscar", "operator"))
    assert client.get(address).status_code == 403


def test_a_user_without_a_role_finds_nothing(client: Client, run: Run) -> None:
    from django.contrib.auth.models import User

    client.force_login(User.objects.create_user("nora"))
    assert client.get(reverse("search-json")).status_code == 403
