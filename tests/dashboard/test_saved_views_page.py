"""Saved views: who makes, sees, changes and deletes which, on the pages and by the API."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from runs.actions import saved_views
from runs.exceptions import CannotDo
from runs.models import SavedView
from tests.browser import seed
from tests.dashboard.people import KINDS, client_for

pytestmark = pytest.mark.django_db


@pytest.fixture
def olga() -> Any:
    return seed.user("olga", "operator")


def told(client: Client) -> str:
    return " ".join(str(m) for m in client.get("/").context["messages"])


def post(client: Client, path: str = "/views", **sent: str) -> Any:
    return client.post(path, {"back": "q=state:failed&sort=-cost&columns=name,cost"} | sent)


def test_a_view_is_what_the_list_shows(olga: Any) -> None:
    client = client_for("owner", olga)
    answer = post(client, name="  Dear   failures ")
    assert answer["Location"] == "/?q=state%3Afailed&sort=-cost&columns=name,cost"
    view = SavedView.objects.get()
    assert (view.name, view.query, view.sort) == ("Dear failures", "state:failed", "-cost")
    assert (view.columns, view.differing, view.shared) == (["name", "cost"], False, False)
    seed.run(olga, state="failed", committed=1, replicas=1)
    page = client.get(answer["Location"])
    (row,) = page.context["views"]
    assert row["shown"]
    assert str(row["address"]) == answer["Location"].removeprefix("/")


@pytest.mark.parametrize("back", ["//evil.example", "https://evil.example?x", "a=1&next=//x"])
def test_the_way_back_leads_to_the_list(olga: Any, back: str) -> None:
    answer = client_for("owner", olga).post("/views", {"name": "x", "back": back})
    assert answer["Location"] == "/"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "found &#x27;&#x27;"),
        ("x" * 81, "1 to 80"),
        ("a\x00b", "1 to 80"),
        ("MINE", "none of your views has"),
    ],
)
def test_what_is_no_name_is_said(olga: Any, name: str, why: str) -> None:
    client = client_for("owner", olga)
    post(client, name="mine")
    page = client.post("/views", {"name": name}, follow=True).content.decode()
    assert "was not saved" in page
    assert why in page
    assert SavedView.objects.count() == 1


def test_names_are_unique_per_person_also_for_two_requests_at_once(olga: Any) -> None:
    oscar = seed.user("oscar", "operator")
    for person in (olga, oscar):
        saved_views.save(person, name="mine")
    with pytest.raises(IntegrityError), transaction.atomic():
        SavedView.objects.create(owner=olga, name="Mine", sort="", changed_at=timezone.now())


def test_a_query_that_is_not_understood_is_not_kept(olga: Any) -> None:
    client = client_for("owner", olga)
    client.post("/views", {"name": "x", "back": "q=los<3"})
    assert "query: los" in told(client)
    assert not SavedView.objects.exists()


def test_no_more_than_so_many(olga: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_views, "PER_PERSON", 1)
    saved_views.save(olga, name="one")
    with pytest.raises(CannotDo, match="at most 1"):
        saved_views.save(olga, name="two")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [False, True])
def test_who_sees_which(olga: Any, kind: str, shared: bool) -> None:
    saved_views.save(olga, name="of olga", shared=shared)
    seed.run(olga, committed=1, replicas=1)
    answer = client_for(kind, olga).get("/")
    if kind == "anonymous":
        assert answer["Location"].startswith("/login")
        return
    seen = shared or kind == "owner"
    assert ("of olga" in answer.content.decode()) == seen
    assert ("Change of olga" in answer.content.decode()) == (
        kind == "owner" or (kind == "admin" and shared)
    )


@pytest.mark.parametrize("do", ["change", "replace", "delete"])
@pytest.mark.parametrize(
    ("kind", "private", "shared"),
    [("viewer", 404, 403), ("stranger", 404, 403), ("owner", 302, 302), ("admin", 403, 403)],
)
def test_who_changes_which(olga: Any, do: str, kind: str, private: int, shared: int) -> None:
    client = client_for(kind, olga)
    for is_shared, expected in ((False, private), (True, shared)):
        view = saved_views.save(olga, name=f"{is_shared}", shared=is_shared)
        answer = post(client, f"/views/{view.pk}", do=do, name=f"new {is_shared}")
        may = kind == "admin" and do == "delete"
        assert answer.status_code == (302 if may else expected)
        found = SavedView.objects.filter(pk=view.pk).first()
        changed = found is None or found.name != view.name or found.query != ""
        assert changed == (may or kind == "owner")
        assert (found is None) == (do == "delete" and (may or kind == "owner"))


def test_anonymous_and_somebody_without_a_role_keep_none(olga: Any) -> None:
    view = saved_views.save(olga, name="x", shared=True)
    assert post(Client(), name="y")["Location"].startswith("/login")
    nobody = Client()
    nobody.force_login(seed.user("nobody", ""))
    assert post(nobody, name="y").status_code == 403
    assert post(nobody, f"/views/{view.pk}", do="delete").status_code == 403
    assert SavedView.objects.count() == 1


def test_a_viewer_keeps_views_and_shares_none(olga: Any) -> None:
    client = client_for("viewer", olga)
    post(client, name="mine")
    post(client, name="everybody's", shared="1")
    assert [(v.name, v.shared) for v in SavedView.objects.all()] == [("mine", False)]
    assert "who may share a view" in told(client)


@pytest.mark.parametrize("sent", [{}, {"do": "drop"}])
def test_what_is_no_action_is_refused(olga: Any, sent: dict[str, str]) -> None:
    view = saved_views.save(olga, name="x")
    assert post(client_for("owner", olga), f"/views/{view.pk}", **sent).status_code == 400


def test_a_form_that_has_expired_changes_nothing(olga: Any) -> None:
    client = client_for("owner", olga, enforce_csrf_checks=True)
    assert post(client, name="x").status_code == 403
    assert not SavedView.objects.exists()


def test_views_cost_the_list_one_query(olga: Any) -> None:
    client = client_for("owner", olga)
    seed.run(olga, committed=1, replicas=1)

    def asked() -> int:
        with CaptureQueriesContext(connection) as queries:
            client.get("/")
        return len(queries)

    saved_views.save(olga, name="0")
    few = asked()
    for n in range(1, 6):
        saved_views.save(olga, name=str(n), shared=True)
    assert asked() == few


# By the API.


def api(client: Client, method: str, path: str = "/api/views", body: Any = None) -> Any:
    return getattr(client, method)(path, body, content_type="application/json")


def test_programs_keep_views_as_well(olga: Any) -> None:
    client = client_for("owner", olga)
    sent = {"name": "Failures", "query": "state:failed", "sort": "-cost", "shared": True,
            "columns": ["cost", "name"], "differing": True}  # fmt: skip
    made = api(client, "post", body=sent)
    assert made.status_code == 201
    body = made.json()
    assert body == sent | {
        "id": body["id"], "owner": "olga", "mine": True, "columns": ["name", "cost"],
    }  # fmt: skip
    seen = client_for("viewer", olga).get("/api/views").json()["views"]
    assert seen == [body | {"mine": False}]
    assert api(client, "post", body=sent).status_code == 409
    assert api(client, "delete", f"/api/views/{body['id']}").json() == {"views": []}
    assert api(client, "delete", f"/api/views/{body['id']}").status_code == 404


def test_a_private_view_is_not_there_for_others(olga: Any) -> None:
    view = saved_views.save(olga, name="x")
    for kind in ("viewer", "stranger"):
        client = client_for(kind, olga)
        assert client.get("/api/views").json() == {"views": []}
        assert api(client, "delete", f"/api/views/{view.pk}").status_code == 404
    assert api(client_for("admin", olga), "delete", f"/api/views/{view.pk}").status_code == 200


@pytest.mark.parametrize(
    ("wrong", "status"),
    [({"query": "los<3"}, 422), ({"columns": ["nonsense"]}, 422), ({"sort": "nonsense"}, 422),
     ({"name": ""}, 422), ({"more": 1}, 422), ({"name": "   "}, 409)],
)  # fmt: skip
def test_what_is_wrong_is_said(olga: Any, wrong: dict[str, Any], status: int) -> None:
    answer = api(client_for("owner", olga), "post", body={"name": "x"} | wrong)
    assert answer.status_code == status
    assert "expected" in answer.content.decode().lower()


def test_a_viewer_shares_none_by_the_api(olga: Any) -> None:
    client = client_for("viewer", olga)
    assert api(client, "post", body={"name": "x", "shared": True}).status_code == 403
    assert api(client, "post", body={"name": "x"}).status_code == 201
