"""Saved views on the pages and through the API: create, list, change, delete, permissions."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from runs.actions import saved_views, shared_rows
from runs.exceptions import ActionRefused
from runs.models import SavedView
from tests.browser import seed
from tests.dashboard.page_harness import KINDS, client_for

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator_user() -> Any:
    return seed.user("olga", "operator")


def messages_of(client: Client) -> str:
    return " ".join(str(m) for m in client.get("/").context["messages"])


def post(client: Client, path: str = "/views", **sent: str) -> Any:
    return client.post(path, {"back": "q=state:failed&sort=-cost&columns=name,cost"} | sent)


def test_a_view_saves_what_the_list_shows(operator_user: Any) -> None:
    client = client_for("owner", operator_user)
    response = post(client, name="  Dear   failures ")
    assert response["Location"] == "/?q=state%3Afailed&sort=-cost&columns=name,cost"
    view = SavedView.objects.get()
    assert (view.name, view.query, view.sort) == ("Dear failures", "state:failed", "-cost")
    assert (view.columns, view.differing, view.shared) == (["name", "cost"], False, False)
    seed.run(operator_user, state="failed", committed=1, replicas=1)
    page = client.get(response["Location"])
    (row,) = page.context["views"]
    assert row["shown"]
    assert row["href"] == response["Location"]


@pytest.mark.parametrize("back", ["//evil.example", "https://evil.example?x", "a=1&next=//x"])
def test_saving_redirects_to_the_list(operator_user: Any, back: str) -> None:
    response = client_for("owner", operator_user).post("/views", {"name": "x", "back": back})
    assert response["Location"] == "/"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "found &#x27;&#x27;"),
        ("x" * 81, "1 to 80"),
        ("a\x00b", "1 to 80"),
        ("MINE", "none of your views has"),
    ],
)
def test_invalid_names_are_reported(operator_user: Any, name: str, why: str) -> None:
    client = client_for("owner", operator_user)
    post(client, name="mine")
    page = client.post("/views", {"name": name}, follow=True).content.decode()
    assert "not saved" in page
    assert why in page
    assert SavedView.objects.count() == 1


def test_names_are_unique_per_user_also_concurrently(operator_user: Any) -> None:
    oscar = seed.user("oscar", "operator")
    for person in (operator_user, oscar):
        saved_views.save(person, name="mine")
    with pytest.raises(IntegrityError), transaction.atomic():
        SavedView.objects.create(
            owner=operator_user, name="Mine", sort="", changed_at=timezone.now()
        )


def test_an_invalid_query_is_not_saved(operator_user: Any) -> None:
    client = client_for("owner", operator_user)
    client.post("/views", {"name": "x", "back": "q=los<3"})
    assert "query: los" in messages_of(client)
    assert not SavedView.objects.exists()


def test_the_number_of_views_is_limited(
    operator_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rows, "PER_PERSON", 1)
    saved_views.save(operator_user, name="one")
    with pytest.raises(ActionRefused, match="at most 1"):
        saved_views.save(operator_user, name="two")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [False, True])
def test_visibility_of_views(operator_user: Any, kind: str, shared: bool) -> None:
    saved_views.save(operator_user, name="of olga", shared=shared)
    seed.run(operator_user, committed=1, replicas=1)
    response = client_for(kind, operator_user).get("/")
    if kind == "anonymous":
        assert response["Location"].startswith("/login")
        return
    seen = shared or kind == "owner"
    assert ("of olga" in response.content.decode()) == seen
    assert ("Change of olga" in response.content.decode()) == (
        kind == "owner" or (kind == "admin" and shared)
    )


@pytest.mark.parametrize("do", ["change", "replace", "delete"])
@pytest.mark.parametrize(
    ("kind", "private", "shared"),
    [("viewer", 404, 403), ("stranger", 404, 403), ("owner", 302, 302), ("admin", 403, 403)],
)
def test_permissions_to_change_views(
    operator_user: Any, do: str, kind: str, private: int, shared: int
) -> None:
    client = client_for(kind, operator_user)
    for is_shared, expected in ((False, private), (True, shared)):
        view = saved_views.save(operator_user, name=f"{is_shared}", shared=is_shared)
        response = post(client, f"/views/{view.pk}", do=do, name=f"new {is_shared}")
        may = kind == "admin" and do == "delete"
        assert response.status_code == (302 if may else expected)
        result = SavedView.objects.filter(pk=view.pk).first()
        changed = result is None or result.name != view.name or result.query != ""
        assert changed == (may or kind == "owner")
        assert (result is None) == (do == "delete" and (may or kind == "owner"))


def test_saving_a_view_requires_a_role(operator_user: Any) -> None:
    view = saved_views.save(operator_user, name="x", shared=True)
    assert post(Client(), name="y")["Location"].startswith("/login")
    no_role = Client()
    no_role.force_login(seed.user("no-role", ""))
    assert post(no_role, name="y").status_code == 403
    assert post(no_role, f"/views/{view.pk}", do="delete").status_code == 403
    assert SavedView.objects.count() == 1


def test_viewers_can_save_but_not_share_views(operator_user: Any) -> None:
    client = client_for("viewer", operator_user)
    post(client, name="mine")
    post(client, name="for all", shared="1")
    assert [(v.name, v.shared) for v in SavedView.objects.all()] == [("mine", False)]
    assert "can share a view" in messages_of(client)


@pytest.mark.parametrize("sent", [{}, {"do": "drop"}])
def test_unknown_actions_are_rejected(operator_user: Any, sent: dict[str, str]) -> None:
    view = saved_views.save(operator_user, name="x")
    assert post(client_for("owner", operator_user), f"/views/{view.pk}", **sent).status_code == 400


def test_an_expired_form_changes_nothing(operator_user: Any) -> None:
    client = client_for("owner", operator_user, enforce_csrf_checks=True)
    assert post(client, name="x").status_code == 403
    assert not SavedView.objects.exists()


def test_views_need_one_query(operator_user: Any) -> None:
    client = client_for("owner", operator_user)
    seed.run(operator_user, committed=1, replicas=1)

    def count_queries() -> int:
        with CaptureQueriesContext(connection) as queries:
            client.get("/")
        return len(queries)

    saved_views.save(operator_user, name="0")
    few = count_queries()
    for n in range(1, 6):
        saved_views.save(operator_user, name=str(n), shared=True)
    assert count_queries() == few


# Through the API.


def api(client: Client, method: str, path: str = "/api/views", body: Any = None) -> Any:
    return getattr(client, method)(path, body, content_type="application/json")


def test_views_through_the_api(operator_user: Any) -> None:
    client = client_for("owner", operator_user)
    sent = {
        "name": "Failures",
        "query": "state:failed",
        "sort": "-cost",
        "shared": True,
        "columns": ["cost", "name"],
        "differing": True,
        "group": "",
    }
    created = api(client, "post", body=sent)
    assert created.status_code == 201
    body = created.json()
    assert body == sent | {
        "id": body["id"],
        "owner": "olga",
        "mine": True,
        "columns": ["name", "cost"],
    }
    seen = client_for("viewer", operator_user).get("/api/views").json()["views"]
    assert seen == [body | {"mine": False}]
    assert api(client, "post", body=sent).status_code == 409
    assert api(client, "delete", f"/api/views/{body['id']}").json() == {"views": []}
    assert api(client, "delete", f"/api/views/{body['id']}").status_code == 404


def test_a_private_view_is_a_404_for_others(operator_user: Any) -> None:
    view = saved_views.save(operator_user, name="x")
    for kind in ("viewer", "stranger"):
        client = client_for(kind, operator_user)
        assert client.get("/api/views").json() == {"views": []}
        assert api(client, "delete", f"/api/views/{view.pk}").status_code == 404
    assert (
        api(client_for("admin", operator_user), "delete", f"/api/views/{view.pk}").status_code
        == 200
    )


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"query": "los<3"}, 422),
        ({"columns": ["nonsense"]}, 422),
        ({"sort": "nonsense"}, 422),
        ({"name": ""}, 422),
        ({"more": 1}, 422),
        ({"name": "   "}, 409),
        ({"name": "x" * 81}, 422),
    ],
)
def test_errors_are_reported(operator_user: Any, wrong: dict[str, Any], status: int) -> None:
    response = api(client_for("owner", operator_user), "post", body={"name": "x"} | wrong)
    assert response.status_code == status
    assert "expected" in response.content.decode().lower()


def test_viewers_cannot_share_views_through_the_api(operator_user: Any) -> None:
    client = client_for("viewer", operator_user)
    assert api(client, "post", body={"name": "x", "shared": True}).status_code == 403
    assert api(client, "post", body={"name": "x"}).status_code == 201
