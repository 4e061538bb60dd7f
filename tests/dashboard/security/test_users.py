"""User administration by administrators, who cannot remove the last administrator."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client

from runs.actions import api_tokens, users
from tests.browser import seed
from tests.dashboard.page_harness import KINDS, client_for

pytestmark = pytest.mark.django_db
NEW = {"name": "nora", "role": "operator"}
PASSWORD = "correct horse battery"
CHOSEN = {"new_password1": "staple of the horse", "new_password2": "staple of the horse"}


@pytest.fixture
def admin_user() -> Any:
    return seed.user("boss", "admin")


@pytest.fixture
def client(admin_user: Any) -> Client:
    created = Client()
    created.force_login(admin_user)
    return created


def link_of(response: Any) -> str:
    page = response.content.decode()
    return str(page.split('id="given-link"')[1].split('value="')[1].split('"')[0])


def follow(link: str) -> tuple[Client, Any]:
    """Open the link as the user who received it."""
    created = Client()
    return created, created.get(link.removeprefix("http://testserver"), follow=True)


def choose(link: str, sent: dict[str, str] = CHOSEN) -> Any:
    created, page = follow(link)
    return created.post(page.redirect_chain[-1][0], sent, follow=True)


@pytest.mark.parametrize("kind", KINDS)
def test_only_administrators_manage_users(kind: str) -> None:
    owner = seed.user("owner", "operator")
    client = client_for(kind, owner)
    target = seed.user("target", "viewer")
    responses = [
        client.get("/settings/people"),
        client.post("/settings/people", NEW),
        client.post(f"/settings/people/{target.pk}/role", {"role": "admin"}),
        client.post(f"/settings/people/{target.pk}/active", {"active": "0"}),
        client.post(f"/settings/people/{target.pk}/reset"),
    ]
    target.refresh_from_db()
    if kind == "admin":
        assert [a.status_code for a in responses] == [200, 200, 302, 302, 302]
        assert not target.is_active
        return
    assert {a.status_code for a in responses} == {302 if kind == "anonymous" else 403}
    assert target.is_active
    assert list(target.groups.values_list("name", flat=True)) == ["viewer"]
    assert not User.objects.filter(username="nora").exists()


def test_the_menu_links_to_the_user_page_for_administrators(client: Client) -> None:
    assert 'href="/settings/people"' in client.get("/").content.decode()
    viewer = client_for("viewer", None).get("/").content.decode()
    assert 'href="/settings/people"' not in viewer
    assert 'href="/settings/password"' in client_for("viewer", None).get("/settings/tokens").text


def test_a_new_user_chooses_a_password_with_a_link_that_works_once(client: Client) -> None:
    response = client.post("/settings/people", NEW)
    link = link_of(response)
    assert response["Cache-Control"].startswith("max-age=0")
    nora = User.objects.get(username="nora")
    assert not nora.has_usable_password()
    assert link not in client.get("/settings/people").content.decode()
    assert "Your password is set" in choose(link).content.decode()
    assert Client().login(username="nora", password=CHOSEN["new_password1"])
    assert list(nora.groups.values_list("name", flat=True)) == ["operator"]
    assert "This link is not valid" in follow(link)[1].content.decode()


def test_a_weak_password_is_rejected_on_the_link_page(client: Client) -> None:
    link = link_of(client.post("/settings/people", NEW))
    weak = {"new_password1": "12345", "new_password2": "12345"}
    assert "too short" in choose(link, weak).content.decode()
    assert not User.objects.get(username="nora").has_usable_password()


def test_a_link_expires(client: Client, settings: Any) -> None:
    link = link_of(client.post("/settings/people", NEW))
    settings.PASSWORD_RESET_TIMEOUT = -1
    assert "This link is not valid" in follow(link)[1].content.decode()


def test_the_link_of_a_deactivated_user_is_invalid(client: Client) -> None:
    link = link_of(client.post("/settings/people", NEW))
    nora = User.objects.get(username="nora")
    client.post(f"/settings/people/{nora.pk}/active", {"active": "0"})
    assert "This link is not valid" in follow(link)[1].content.decode()
    client.post(f"/settings/people/{nora.pk}/active", {"active": "1"})
    assert "Choose a password" in follow(link)[1].content.decode()


@pytest.mark.parametrize("name", ["NORA", "no space", "", "x" * 151])
def test_invalid_user_names(client: Client, name: str) -> None:
    seed.user("nora", "viewer")
    response = client.post("/settings/people", NEW | {"name": name})
    assert response.status_code == 422
    assert User.objects.count() == 2


def test_changing_a_role_changes_its_permissions(client: Client) -> None:
    vera = seed.user("vera", "viewer")
    client.post(f"/settings/people/{vera.pk}/role", {"role": "admin"})
    vera.refresh_from_db()
    assert (vera.is_staff, vera.is_superuser) == (True, True)
    client.post(f"/settings/people/{vera.pk}/role", {"role": "operator"})
    vera.refresh_from_db()
    assert (vera.is_staff, vera.is_superuser) == (False, False)
    assert list(vera.groups.values_list("name", flat=True)) == ["operator"]
    reported = client.post(f"/settings/people/{vera.pk}/role", {"role": "emperor"}, follow=True)
    assert "expected a role of" in reported.content.decode()


def test_deactivation_ends_sessions_and_tokens(client: Client) -> None:
    vera = seed.user("vera", "viewer")
    _, text = api_tokens.issue(vera, name="laptop", scopes=["read"])
    other = Client()
    assert other.login(username="vera", password=PASSWORD)
    client.post(f"/settings/people/{vera.pk}/active", {"active": "0"})
    assert other.get("/")["Location"].startswith("/login")
    assert not Client().login(username="vera", password=PASSWORD)
    bearer = {"Authorization": f"Bearer {text}"}
    assert Client().get("/api/me", headers=bearer).status_code == 401
    client.post(f"/settings/people/{vera.pk}/active", {"active": "1"})
    assert Client().login(username="vera", password=PASSWORD)


def test_a_password_reset_ends_all_sessions(client: Client) -> None:
    vera = seed.user("vera", "viewer")
    other = Client()
    assert other.login(username="vera", password=PASSWORD)
    link = link_of(client.post(f"/settings/people/{vera.pk}/reset"))
    assert other.get("/")["Location"].startswith("/login")
    assert not Client().login(username="vera", password=PASSWORD)
    choose(link)
    assert Client().login(username="vera", password=CHOSEN["new_password1"])


def test_administrators_cannot_reset_their_own_password(client: Client, admin_user: Any) -> None:
    response = client.post(f"/settings/people/{admin_user.pk}/reset", follow=True)
    assert "Change your own password under Password" in response.content.decode()
    admin_user.refresh_from_db()
    assert admin_user.has_usable_password()


@pytest.mark.parametrize("act", ["role", "active"])
def test_the_last_administrator_cannot_be_removed(
    client: Client, admin_user: Any, act: str
) -> None:
    # Neither of these users can sign in as an administrator.
    gone = seed.user("gone", "admin")
    User.objects.filter(pk=gone.pk).update(is_active=False)
    users.add_person("invited", role="admin", actor=admin_user)
    sent = {"role": "viewer"} if act == "role" else {"active": "0"}
    response = client.post(f"/settings/people/{admin_user.pk}/{act}", sent, follow=True)
    assert "expected at least one active administrator" in response.content.decode()
    admin_user.refresh_from_db()
    assert admin_user.is_active
    assert list(admin_user.groups.values_list("name", flat=True)) == ["admin"]
    seed.user("second", "admin")
    client.post(f"/settings/people/{admin_user.pk}/{act}", sent)
    admin_user.refresh_from_db()
    assert users.administrators().get().username == "second"


def test_two_administrators_cannot_reset_each_other_s_password(admin_user: Any) -> None:
    second = seed.user("second", "admin")
    users.reset_password(second, actor=admin_user)
    with pytest.raises(ValueError, match="found none"):
        users.reset_password(admin_user, actor=second)
    admin_user.refresh_from_db()
    assert admin_user.has_usable_password()


def test_user_changes_are_audited(client: Client, admin_user: Any) -> None:
    client.post("/settings/people", NEW)
    nora = User.objects.get(username="nora")
    client.post(f"/settings/people/{nora.pk}/role", {"role": "viewer"})
    client.post(f"/settings/people/{nora.pk}/active", {"active": "0"})
    reported = LogEntry.objects.filter(user=admin_user, object_id=str(nora.pk)).order_by("id")
    assert [entry.change_message for entry in reported] == [
        "added as operator",
        "made viewer",
        "deactivated",
    ]


def test_the_admin_site_enforces_the_same_rules(client: Client, admin_user: Any) -> None:
    assert client.get("/admin/").status_code == 200
    assert client.get(f"/admin/auth/user/{admin_user.pk}/change/").status_code == 404
    assert client.get("/admin/auth/group/").status_code == 404


def test_the_number_of_queries_does_not_depend_on_users(
    client: Client, django_assert_num_queries: Any
) -> None:
    for number in range(3):
        seed.user(f"person-{number}", "viewer")
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as few:
        client.get("/settings/people")
    for number in range(30):
        seed.user(f"more-{number}", "operator")
    with django_assert_num_queries(len(few)):
        assert client.get("/settings/people").content.decode().count("Manage<") == 34


def test_users_are_paged_and_searchable(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dashboard.views.users.PAGE_SIZE", 2)
    for name in ("ann", "bob", "cleo"):
        seed.user(name, "viewer")
    first = client.get("/settings/people").content.decode()
    assert 'after=bob"' in first.replace("&amp;", "&").replace("?after", "after")
    second = client.get("/settings/people?after=bob").content.decode()
    assert ">cleo<" in second
    assert ">ann<" not in second
    result = client.get("/settings/people?q=CLE").content.decode()
    assert ">cleo<" in result
    assert ">bob<" not in result
    assert "No user has this name" in client.get("/settings/people?q=zz").content.decode()
