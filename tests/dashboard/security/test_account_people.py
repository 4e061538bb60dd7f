"""Administrators look after people on a page, and never lose the last of themselves."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client

from runs.actions import api_tokens, users
from tests.browser import seed
from tests.dashboard.people import KINDS, client_for

pytestmark = pytest.mark.django_db
NEW = {"name": "nora", "role": "operator"}
PASSWORD = "correct horse battery"
CHOSEN = {"new_password1": "staple of the horse", "new_password2": "staple of the horse"}


@pytest.fixture
def boss() -> Any:
    return seed.user("boss", "admin")


@pytest.fixture
def client(boss: Any) -> Client:
    made = Client()
    made.force_login(boss)
    return made


def link_of(answer: Any) -> str:
    page = answer.content.decode()
    return str(page.split('id="given-link"')[1].split('value="')[1].split('"')[0])


def follow(link: str) -> tuple[Client, Any]:
    """As the person who was given the link."""
    made = Client()
    return made, made.get(link.removeprefix("http://testserver"), follow=True)


def choose(link: str, sent: dict[str, str] = CHOSEN) -> Any:
    made, page = follow(link)
    return made.post(page.redirect_chain[-1][0], sent, follow=True)


@pytest.mark.parametrize("kind", KINDS)
def test_only_administrators_look_after_people(kind: str) -> None:
    owner = seed.user("owner", "operator")
    client = client_for(kind, owner)
    target = seed.user("target", "viewer")
    asked = [
        client.get("/people/"),
        client.post("/people/", NEW),
        client.post(f"/people/{target.pk}/role", {"role": "admin"}),
        client.post(f"/people/{target.pk}/active", {"active": "0"}),
        client.post(f"/people/{target.pk}/reset"),
    ]
    target.refresh_from_db()
    if kind == "admin":
        assert [a.status_code for a in asked] == [200, 200, 302, 302, 302]
        assert not target.is_active
        return
    assert {a.status_code for a in asked} == {302 if kind == "anonymous" else 403}
    assert target.is_active
    assert list(target.groups.values_list("name", flat=True)) == ["viewer"]
    assert not User.objects.filter(username="nora").exists()


def test_the_menu_leads_administrators_there(client: Client) -> None:
    assert 'href="/people/"' in client.get("/").content.decode()
    viewer = client_for("viewer", None).get("/").content.decode()
    assert 'href="/people/"' not in viewer
    assert 'href="/account/password"' in viewer


def test_somebody_new_chooses_a_password_under_a_link_that_works_once(client: Client) -> None:
    answer = client.post("/people/", NEW)
    link = link_of(answer)
    assert answer["Cache-Control"].startswith("max-age=0")
    nora = User.objects.get(username="nora")
    assert not nora.has_usable_password()
    assert link not in client.get("/people/").content.decode()
    assert "Your password is set" in choose(link).content.decode()
    assert Client().login(username="nora", password=CHOSEN["new_password1"])
    assert list(nora.groups.values_list("name", flat=True)) == ["operator"]
    assert "This link opens nothing" in follow(link)[1].content.decode()


def test_a_weak_password_is_refused_under_a_link(client: Client) -> None:
    link = link_of(client.post("/people/", NEW))
    weak = {"new_password1": "12345", "new_password2": "12345"}
    assert "too short" in choose(link, weak).content.decode()
    assert not User.objects.get(username="nora").has_usable_password()


def test_a_link_ends(client: Client, settings: Any) -> None:
    link = link_of(client.post("/people/", NEW))
    settings.PASSWORD_RESET_TIMEOUT = -1
    assert "This link opens nothing" in follow(link)[1].content.decode()


def test_a_link_of_somebody_deactivated_opens_nothing(client: Client) -> None:
    link = link_of(client.post("/people/", NEW))
    nora = User.objects.get(username="nora")
    client.post(f"/people/{nora.pk}/active", {"active": "0"})
    assert "This link opens nothing" in follow(link)[1].content.decode()
    client.post(f"/people/{nora.pk}/active", {"active": "1"})
    assert "Choose a password" in follow(link)[1].content.decode()


@pytest.mark.parametrize("name", ["NORA", "no space", "", "x" * 151])
def test_names_nobody_can_have(client: Client, name: str) -> None:
    seed.user("nora", "viewer")
    answer = client.post("/people/", NEW | {"name": name})
    assert answer.status_code == 422
    assert User.objects.count() == 2


def test_a_role_is_changed_with_all_that_comes_with_it(client: Client) -> None:
    vera = seed.user("vera", "viewer")
    client.post(f"/people/{vera.pk}/role", {"role": "admin"})
    vera.refresh_from_db()
    assert (vera.is_staff, vera.is_superuser) == (True, True)
    client.post(f"/people/{vera.pk}/role", {"role": "operator"})
    vera.refresh_from_db()
    assert (vera.is_staff, vera.is_superuser) == (False, False)
    assert list(vera.groups.values_list("name", flat=True)) == ["operator"]
    told = client.post(f"/people/{vera.pk}/role", {"role": "emperor"}, follow=True)
    assert "expected a role of" in told.content.decode()


def test_whoever_is_deactivated_is_out_at_once(client: Client) -> None:
    vera = seed.user("vera", "viewer")
    _, text = api_tokens.issue(vera, name="laptop", scopes=["read"])
    theirs = Client()
    assert theirs.login(username="vera", password=PASSWORD)
    client.post(f"/people/{vera.pk}/active", {"active": "0"})
    assert theirs.get("/")["Location"].startswith("/login")
    assert not Client().login(username="vera", password=PASSWORD)
    bearer = {"Authorization": f"Bearer {text}"}
    assert Client().get("/api/me", headers=bearer).status_code == 401
    client.post(f"/people/{vera.pk}/active", {"active": "1"})
    assert Client().login(username="vera", password=PASSWORD)


def test_a_reset_password_opens_nothing_and_ends_every_session(client: Client) -> None:
    vera = seed.user("vera", "viewer")
    theirs = Client()
    assert theirs.login(username="vera", password=PASSWORD)
    link = link_of(client.post(f"/people/{vera.pk}/reset"))
    assert theirs.get("/")["Location"].startswith("/login")
    assert not Client().login(username="vera", password=PASSWORD)
    choose(link)
    assert Client().login(username="vera", password=CHOSEN["new_password1"])


def test_one_s_own_password_is_not_reset_but_changed(client: Client, boss: Any) -> None:
    answer = client.post(f"/people/{boss.pk}/reset", follow=True)
    assert "you change under Password" in answer.content.decode()
    boss.refresh_from_db()
    assert boss.has_usable_password()


@pytest.mark.parametrize("act", ["role", "active"])
def test_the_last_administrator_stays(client: Client, boss: Any, act: str) -> None:
    # Neither of these could sign in and help.
    gone = seed.user("gone", "admin")
    User.objects.filter(pk=gone.pk).update(is_active=False)
    users.add_person("invited", role="admin", actor=boss)
    sent = {"role": "viewer"} if act == "role" else {"active": "0"}
    answer = client.post(f"/people/{boss.pk}/{act}", sent, follow=True)
    assert "expected at least one active administrator" in answer.content.decode()
    boss.refresh_from_db()
    assert boss.is_active
    assert list(boss.groups.values_list("name", flat=True)) == ["admin"]
    seed.user("second", "admin")
    client.post(f"/people/{boss.pk}/{act}", sent)
    boss.refresh_from_db()
    assert users.administrators().get().username == "second"


def test_two_administrators_cannot_reset_each_other_s_password(boss: Any) -> None:
    second = seed.user("second", "admin")
    users.reset_password(second, actor=boss)
    with pytest.raises(ValueError, match="found none"):
        users.reset_password(boss, actor=second)
    boss.refresh_from_db()
    assert boss.has_usable_password()


def test_who_did_what_is_kept(client: Client, boss: Any) -> None:
    client.post("/people/", NEW)
    nora = User.objects.get(username="nora")
    client.post(f"/people/{nora.pk}/role", {"role": "viewer"})
    client.post(f"/people/{nora.pk}/active", {"active": "0"})
    told = LogEntry.objects.filter(user=boss, object_id=str(nora.pk)).order_by("id")
    assert [entry.change_message for entry in told] == [
        "added as operator", "made viewer", "deactivated",
    ]  # fmt: skip


def test_the_administration_is_no_way_around(client: Client, boss: Any) -> None:
    assert client.get("/admin/").status_code == 200
    assert client.get(f"/admin/auth/user/{boss.pk}/change/").status_code == 404
    assert client.get("/admin/auth/group/").status_code == 404


def test_as_many_queries_for_many_as_for_one(
    client: Client, django_assert_num_queries: Any
) -> None:
    for number in range(3):
        seed.user(f"person-{number}", "viewer")
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as few:
        client.get("/people/")
    for number in range(30):
        seed.user(f"more-{number}", "operator")
    with django_assert_num_queries(len(few)):
        assert client.get("/people/").content.decode().count("Manage<") == 34


def test_many_are_shown_by_pages_and_found_by_name(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dashboard.views.people.PAGE_SIZE", 2)
    for name in ("ann", "bob", "cleo"):
        seed.user(name, "viewer")
    first = client.get("/people/").content.decode()
    assert 'after=bob"' in first.replace("&amp;", "&").replace("?after", "after")
    second = client.get("/people/?after=bob").content.decode()
    assert ">cleo<" in second
    assert ">ann<" not in second
    found = client.get("/people/?q=CLE").content.decode()
    assert ">cleo<" in found
    assert ">bob<" not in found
    assert "Nobody of that name" in client.get("/people/?q=zz").content.decode()
