"""Saved views of the run page: on the page and through the API."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from runs.actions import run_views, shared_rows
from runs.models import Run, RunView
from runs.queries.panel_layout import PanelLayout
from tests.browser import seed
from tests.dashboard.page_harness import KINDS, client_for

pytestmark = pytest.mark.django_db

SHOWN = "?panels=update.l!,-goodput,m:grad_norm.s&x=tokens&log=y"
LAYOUT = PanelLayout(panels="update.l!,-goodput,m:grad_norm.s", x="tokens", log="y")


@pytest.fixture
def run() -> Run:
    made: Run = seed.run(seed.user("olga", "operator"), committed=1, replicas=1)
    return made


def post(client: Client, run: Run, path: str = "", **sent: str) -> Any:
    return client.post(f"/runs/{run.pk}/views{path}", {"back": SHOWN} | sent)


def messages_of(client: Client, run: Run) -> str:
    return " ".join(str(m) for m in client.get(f"/runs/{run.pk}/").context["messages"])


def test_a_view_saves_the_panels_and_restores_them_on_every_run(run: Run) -> None:
    client = client_for("owner", run.owner)
    response = post(client, run, name="  Health  check ", back=f"{SHOWN}&from=3&to=9")
    assert response["Location"] == f"/runs/{run.pk}/{SHOWN}&from=3&to=9"
    view = RunView.objects.get()
    assert (view.name, view.shared, PanelLayout.of_view(view)) == ("Health check", False, LAYOUT)
    other = seed.run(run.owner, name="Other", committed=1, replicas=1)
    page = client.get(f"/runs/{other.pk}/").content.decode()
    assert f'href="{SHOWN.replace("&", "&amp;")}" title="Health check"' in page
    assert f'action="/runs/{other.pk}/views/{view.pk}"' in page


def test_a_query_that_is_too_long_when_escaped_is_left_out(run: Run) -> None:
    client = client_for("owner", run.owner)
    response = post(client, run, name="Health", back="x=tokens&text=" + "\u00e9" * 7000)
    assert response["Location"] == f"/runs/{run.pk}/"
    assert RunView.objects.count() == 1
    sent = {"name": "Long", "back": "q=" + "\u00e9" * 7000}
    assert client.post("/views", sent)["Location"] == "/"


def test_a_view_is_changed_replaced_and_deleted(run: Run) -> None:
    client = client_for("owner", run.owner)
    view = run_views.save(run.owner, LAYOUT, name="Mine")
    post(client, run, f"/{view.pk}", do="change", name="All", shared="1")
    post(client, run, f"/{view.pk}", do="replace", back="?tab=overview&x=wall&clip=1")
    view.refresh_from_db()
    assert (view.name, view.shared) == ("All", True)
    assert PanelLayout.of_view(view) == PanelLayout(x="wall", clip=True)
    assert post(client, run, f"/{view.pk}", do="drop").status_code == 400
    post(client, run, f"/{view.pk}", do="delete")
    assert not RunView.objects.exists()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ({"name": ""}, "expected a name"),
        ({"name": "MINE"}, "none of your views of runs has"),
        ({"name": "x", "back": "?panels=loss"}, "panels: expected panels such as"),
        ({"name": "x", "back": "?x=money"}, "x: expected one of step"),
    ],
)
def test_invalid_views_are_reported(run: Run, sent: dict[str, str], why: str) -> None:
    client = client_for("owner", run.owner)
    run_views.save(run.owner, LAYOUT, name="mine")
    post(client, run, **sent)
    message = messages_of(client, run)
    assert "View not saved" in message
    assert why in message
    assert RunView.objects.count() == 1


def test_saving_returns_to_the_run(run: Run) -> None:
    response = post(client_for("owner", run.owner), run, name="x", back="//evil.example?x=wall")
    assert response["Location"].startswith(f"/runs/{run.pk}/?")


def test_the_number_of_views_is_limited(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rows, "PER_PERSON", 1)
    client = client_for("owner", run.owner)
    for name in "ab":
        post(client, run, name=name)
    assert "at most 1 views of runs" in messages_of(client, run)
    assert RunView.objects.count() == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [False, True])
def test_visibility_of_views(run: Run, kind: str, shared: bool) -> None:
    run_views.save(run.owner, LAYOUT, name="of olga", shared=shared)
    response = client_for(kind, run.owner).get(f"/runs/{run.pk}/")
    if kind == "anonymous":
        assert response["Location"].startswith("/login")
        return
    assert ("of olga" in response.content.decode()) == (shared or kind == "owner")


@pytest.mark.parametrize("do", ["change", "replace", "delete"])
@pytest.mark.parametrize(
    ("kind", "private", "shared"),
    [("viewer", 404, 403), ("stranger", 404, 403), ("owner", 302, 302), ("admin", 403, 403)],
)
def test_permissions_to_change_views(
    run: Run, do: str, kind: str, private: int, shared: int
) -> None:
    client = client_for(kind, run.owner)
    for is_shared, expected in ((False, private), (True, shared)):
        view = run_views.save(run.owner, PanelLayout(), name=f"{is_shared}", shared=is_shared)
        response = post(client, run, f"/{view.pk}", do=do, name=f"new {is_shared}")
        may = kind == "admin" and do == "delete"
        assert response.status_code == (302 if may else expected)
        result = RunView.objects.filter(pk=view.pk).first()
        changed = result is None or result.name != view.name or result.panels != ""
        assert changed == (may or kind == "owner")


def test_viewers_save_private_views_and_users_without_a_role_none(run: Run) -> None:
    viewer = client_for("viewer", run.owner)
    post(viewer, run, name="mine")
    post(viewer, run, name="for all", shared="1")
    assert [(v.name, v.shared) for v in RunView.objects.all()] == [("mine", False)]
    no_role = Client()
    no_role.force_login(seed.user("no-role", ""))
    assert post(no_role, run, name="x").status_code == 404
    assert post(Client(), run, name="x")["Location"].startswith("/login")
    assert RunView.objects.count() == 1


def test_views_need_one_query(run: Run) -> None:
    client = client_for("owner", run.owner)

    def count_queries() -> int:
        with CaptureQueriesContext(connection) as queries:
            client.get(f"/runs/{run.pk}/")
        return len(queries)

    run_views.save(run.owner, LAYOUT, name="0")
    few = count_queries()
    for number in range(1, 5):
        run_views.save(run.owner, LAYOUT, name=str(number), shared=True)
    assert count_queries() == few


def api(client: Client, method: str, path: str = "/api/run-views", body: Any = None) -> Any:
    return getattr(client, method)(path, body, content_type="application/json")


def test_views_through_the_api(run: Run) -> None:
    client = client_for("owner", run.owner)
    sent = {"name": "Health", "panels": LAYOUT.panels, "x": "tokens", "smooth": 0.0, "shared": True}
    created = api(client, "post", body=sent)
    assert created.status_code == 201, created.content
    body = created.json()
    rest = {"log": "", "clip": None, "owner": "olga", "mine": True, "id": body["id"]}
    assert body == sent | rest
    viewer = client_for("viewer", run.owner)
    assert api(viewer, "get").json()["views"] == [body | {"mine": False}]
    assert api(viewer, "delete", f"/api/run-views/{body['id']}").status_code == 403
    assert api(viewer, "post", body=sent).status_code == 403
    assert api(client, "post", body=sent).status_code == 409
    for wrong in ({"panels": "loss"}, {"x": "money"}, {"smooth": 2}, {"log": "z"}, {"more": 1}):
        response = api(client, "post", body={"name": "x"} | wrong)
        assert response.status_code == 422, wrong
    assert api(client, "delete", f"/api/run-views/{body['id']}").json() == {"views": []}
    assert api(client, "delete", f"/api/run-views/{body['id']}").status_code == 404
