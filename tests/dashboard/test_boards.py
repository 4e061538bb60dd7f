"""Boards: pages, curves, limits, roles, hostile content, and the API."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from archipelago import board_rows
from runs.actions import boards as actions
from runs.actions import shared_rows
from runs.exceptions import ActionRefused
from runs.models import Board, Run
from runs.queries import boards as queries
from tests.browser import seed
from tests.dashboard.page_harness import client_for, errors_at, make_runs

pytestmark = pytest.mark.django_db
PANEL = {"metric": "eval_loss", "x": "tokens", "smooth": "0", "scale": "linear"}


@pytest.fixture
def board(operator_user: Any) -> Board:
    make_runs(operator_user, 2)
    return actions.save(operator_user, name="Live", query="is:active", shared=True)


def call(client: Client, method: str, path: str, body: Any = None) -> Any:
    return getattr(client, method)(f"/api{path}", body or {}, content_type="application/json")


def test_a_board_of_a_query_shows_its_newest_runs(client: Client, board: Board) -> None:
    page = client.get(f"/boards/{board.pk}").content.decode()
    assert "Live" in page and "r0" in page and "r1" in page
    assert page.count("data-compare") == 2
    assert 'data-series="loss" data-x="tokens" data-smooth="0.6"' in page
    assert f'href="/boards/{board.pk}"' in client.get("/boards").content.decode()
    part = client.get(f"/boards/{board.pk}?part=1").content.decode()
    assert "<html" not in part and "Pin" not in part
    curves = client.get(f"/boards/{board.pk}.json").json()
    assert [run["name"] for run in curves["runs"]] == ["r1", "r0"]
    assert {curve["series"] for curve in curves["curves"]} == {"eval_loss", "loss"}


def test_a_board_without_runs(client: Client, operator_user: Any) -> None:
    made = actions.save(operator_user, name="None yet", query="tag:none")
    page = client.get(f"/boards/{made.pk}").content.decode()
    assert "No run matches" in page
    assert client.get("/boards/9999").status_code == 404


def test_the_form_saves_chosen_runs_and_panels(client: Client, operator_user: Any) -> None:
    first, second = make_runs(operator_user, 2)
    prefilled = client.get(f"/boards/new?ids={first.pk},{second.pk}&series=loss&x=wall")
    html = prefilled.content.decode()
    assert html.count('name="runs"') == 2
    assert '<option value="loss" selected>' in html and '<option value="wall" selected>' in html
    sent = {
        "name": "Two",
        "runs": [str(second.pk), str(first.pk)],
        "query": "",
        "metric": ["eval_loss", "", "contributors"],
        "x": ["tokens", "tokens", "wall"],
        "smooth": ["0.5", "0", "0"],
        "scale": ["log", "linear", "linear"],
    }
    response = client.post("/boards/new", sent)
    made = Board.objects.get()
    assert response["Location"] == f"/boards/{made.pk}"
    assert [run.name for run in queries.runs_of(made, operator_user)] == ["r1", "r0"]
    assert queries.panels_of(made) == [
        queries.Panel(smooth=0.5, log=True),
        queries.Panel(metric="contributors", x="wall"),
    ]
    curves = client.get(f"/boards/{made.pk}.json").json()["curves"]
    assert {curve["series"] for curve in curves} == {"eval_loss", "contributors"}
    edit = client.get(f"/boards/{made.pk}/edit").content.decode()
    assert edit.count("checked") == 2 and 'value="Two"' in edit
    client.post(f"/boards/{made.pk}/edit", sent | {"name": "Renamed", "runs": [str(first.pk)]})
    made.refresh_from_db()
    assert (made.name, made.runs) == ("Renamed", [str(first.pk)])


@pytest.mark.parametrize(
    ("change", "field", "why"),
    [
        ({"name": ""}, "name", "This field is required"),
        ({"name": "live"}, "name", "Expected a name that none of your boards has"),
        ({"query": ""}, "query", "Expected either a query or runs, found neither"),
        ({"query": "stat:x"}, "query", "stat:x: expected one of state"),
        ({"query": "a" * 501}, "query", "at most 500 characters"),
        ({"runs": ["x"]}, "runs", "Expected the id of a run, found 'x'"),
        ({"metric": ["", "nothing"]}, "panels.0.metric", "Expected a metric of eval_loss, loss"),
        ({"x": ["colour"]}, "panels.0.x", "Expected an axis of tokens"),
        ({"smooth": ["much"]}, "panels.0.smooth", "Expected a number, found 'much'"),
        ({"smooth": ["1"]}, "panels.0.smooth", "Expected a number from 0 to 0.98, found 1.0"),
        ({"smooth": ["nan"]}, "panels.0.smooth", "Expected a number from 0 to 0.98, found nan"),
    ],
)
def test_a_wrong_form_keeps_its_values(
    client: Client, board: Board, change: dict[str, Any], field: str, why: str
) -> None:
    panels = {key: [value, value] for key, value in PANEL.items()}
    sent = {"name": "Other", "query": "is:ended"} | panels
    response = client.post("/boards/new", sent | change)
    html = response.content.decode()
    assert response.status_code == 422
    assert why in errors_at(html, field)
    assert 'role="alert"' not in html
    assert re.search(rf'aria-describedby="[^"]*{field}_error"', html) or field == "runs"
    assert all(f'value="{text}"' in html for text in change.get("smooth", []))
    if "query" not in change:
        assert 'value="is:ended"' in html
    assert Board.objects.count() == 1


def test_sizes_are_limited(
    client: Client, operator_user: Any, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {key: [value] * 13 for key, value in PANEL.items()}
    response = client.post("/boards/new", {"name": "Many", "query": "is:ended"} | many)
    assert "Expected at most 12 panels, found 13" in errors_at(response.content.decode(), "panels")
    ids = [str(run.pk) for run in make_runs(operator_user, 21)]
    answer = call(client, "post", "/boards", {"name": "Many", "runs": ids})
    assert answer.status_code == 422
    monkeypatch.setattr(shared_rows, "PER_PERSON", 1)
    response = client.post("/boards/new", {"name": "Second", "query": "is:ended"})
    assert "Expected at most 1 boards" in response.content.decode()


def test_roles(board: Board, operator_user: Any) -> None:
    private = actions.save(operator_user, name="Private", query="is:active")
    anonymous = Client(enforce_csrf_checks=True)
    for path in ("", "/new", f"/{board.pk}", f"/{board.pk}.json", f"/{board.pk}/edit"):
        assert anonymous.get(f"/boards{path}")["Location"].startswith("/login")
    anonymous.force_login(operator_user)
    assert anonymous.post(f"/boards/{board.pk}/delete").status_code == 403
    stranger, viewer, admin = (
        client_for(k, operator_user) for k in ("stranger", "viewer", "admin")
    )
    for client in (stranger, viewer):
        assert client.get(f"/boards/{board.pk}").status_code == 200
        assert client.get(f"/boards/{private.pk}").status_code == 404
        assert client.get(f"/boards/{board.pk}/edit").status_code == 403
        assert client.post(f"/boards/{board.pk}/delete").status_code == 403
        assert call(client, "put", f"/boards/{board.pk}", {"name": "x"}).status_code == 403
    sent = {"name": "Mine", "query": "is:mine", "shared": "1"}
    assert (
        "Only operators and administrators can share"
        in viewer.post("/boards/new", sent).content.decode()
    )
    assert admin.post(f"/boards/{private.pk}/delete").status_code == 302
    assert not Board.objects.filter(pk=private.pk).exists()


def test_deletion_asks_for_a_confirmation(client: Client, board: Board) -> None:
    page = client.get(f"/boards/{board.pk}").content.decode()
    menu = page[page.index('<summary class="btn btn-danger">Delete</summary>') :]
    menu = menu[: menu.index("</details>")]
    assert f'action="/boards/{board.pk}/delete"' in menu
    assert "The board is removed for all users. Its runs are kept." in menu
    assert "Delete the board" in menu
    Board.objects.update(shared=False)
    page = client.get(f"/boards/{board.pk}").content.decode()
    assert "removed for all users" not in page
    assert client.get(f"/boards/{board.pk}/delete").status_code == 405
    runs = Run.objects.count()
    client.post(f"/boards/{board.pk}/delete")
    assert (Board.objects.count(), Run.objects.count()) == (0, runs)


def test_is_mine_means_the_owner_of_the_board(operator_user: Any) -> None:
    make_runs(operator_user, 1)
    made = actions.save(operator_user, name="Mine", query="is:mine", shared=True)
    assert [run.name for run in queries.runs_of(made, seed.user("vera", "viewer"))] == ["r0"]


def test_whatever_the_columns_hold_is_shown(client: Client, board: Board) -> None:
    hostile = "<script>alert(1)</script>"
    for runs, panels, query in (
        ([hostile, 3, None], {"metric": 1}, hostile),
        ({"a": 1}, [3, {"metric": hostile, "smooth": "x"}, {"smooth": 1e308}], "stat:x"),
        ("text", 3, ""),
    ):
        Board.objects.update(name=hostile, runs=runs, panels=panels, query=query)
        for path in ("", "?part=1", ".json", "/edit"):
            response = client.get(f"/boards/{board.pk}{path}")
            assert response.status_code == 200
            assert "<script>alert" not in response.content.decode()
        assert call(client, "get", f"/boards/{board.pk}").status_code == 200


def test_the_api(client: Client, operator_user: Any) -> None:
    (run,) = make_runs(operator_user, 1)
    body = {
        "name": "One",
        "runs": [str(run.pk)],
        "panels": [{"metric": "eval-quality-perplexity", "x": "wall"}],
    }
    made = call(client, "post", "/boards", body)
    assert made.status_code == 201, made.content
    row = made.json()
    assert set(row) == {field.name for field in dataclasses.fields(board_rows.Board)}
    assert row["panels"] == [
        {"metric": "eval-quality-perplexity", "x": "wall", "smooth": 0.0, "log": False}
    ]
    path = f"/boards/{row['id']}"
    shown = call(client, "get", path).json()
    assert set(shown) == {field.name for field in dataclasses.fields(board_rows.BoardResults)}
    [result] = shown["results"]
    assert result["run"]["name"] == "r0" and set(result["values"]) == set(shown["measures"])
    assert call(client, "get", f"{path}/curves").json()["curves"] == []
    changed = call(client, "put", path, {"name": "Two", "query": "is:active"}).json()
    assert (changed["name"], changed["runs"], len(changed["panels"])) == ("Two", [], 2)
    wrong = call(client, "post", "/boards", {"name": "Bad", "query": "stat:x"})
    assert wrong.json()["errors"][0]["field"] == "query"
    assert call(client, "delete", path).json() == {"boards": []}
    assert call(client, "get", path).status_code == 404


def test_a_board_that_was_deleted_meanwhile_is_not_stored_again(operator_user: Any) -> None:
    board = actions.save(operator_user, name="Live", query="is:active")
    Board.objects.all().delete()
    with pytest.raises(ActionRefused, match="has been deleted meanwhile"):
        actions.save(operator_user, name="Live", query="is:ended", board=board)
    assert not Board.objects.exists()


def test_the_number_of_queries_does_not_depend_on_runs(
    client: Client, operator_user: Any, board: Board
) -> None:
    def count() -> int:
        with CaptureQueriesContext(connection) as captured:
            client.get(f"/boards/{board.pk}")
        return len(captured)

    before = count()
    make_runs(operator_user, 3)
    assert Run.objects.count() == 5
    assert count() == before
