"""Credentials in the admin: administrators only, write-only, testable, with a history."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client

from runs.actions.credentials import save_credential
from runs.credentials import open_credential
from runs.credentials.kinds import KINDS
from runs.models import Credential
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db
LIST = "/admin/runs/credential/"
TYPED = {
    "name": "our modal",
    "variable_MODAL_TOKEN_ID": "ak-typed-once",
    "variable_MODAL_TOKEN_SECRET": "as-typed-once",
    "option_app": "isles",
}
SECRETS = ("ak-typed-once", "as-typed-once")


@pytest.fixture
def ada() -> Client:
    client = Client()
    client.force_login(w.person("ada", "admin"))
    return client


def add(client: Client, kind: str = "modal", **changes: str) -> Any:
    data = {**(TYPED if kind == "modal" else {}), **changes}
    return client.post(f"{LIST}add/?kind={kind}", data)


def only() -> Credential:
    return Credential.objects.get()


def page(client: Client, path: str = "") -> str:
    response = client.get(path or f"{LIST}{only().pk}/change/")
    assert response.status_code == 200
    assert "script-src 'self'" in response["Content-Security-Policy"]
    return str(response.content.decode())


# Permissions.


@pytest.mark.parametrize("role", ["", "viewer", "operator"])
@pytest.mark.parametrize("staff", [False, True])
def test_credentials_are_hidden_from_other_roles(role: str, staff: bool) -> None:
    made = Credential(name="of-the-isles", kind="modal")
    save_credential(made, typed={"MODAL_TOKEN_ID": "ak"}, actor=None)
    user = w.person("otto", role)
    User.objects.filter(pk=user.pk).update(is_staff=staff)
    client = Client()
    client.force_login(user)
    expected = 403 if staff else 302
    for path in ("", "add/", "add/?kind=modal", f"{made.pk}/change/", f"{made.pk}/delete/"):
        response = client.get(f"{LIST}{path}")
        assert response.status_code == expected, path
        assert b"of-the-isles" not in response.content
        assert client.post(f"{LIST}{path}", TYPED).status_code in (302, 403)
    assert client.post(f"{LIST}{made.pk}/test/").status_code in (302, 404)
    made.refresh_from_db()
    assert (Credential.objects.count(), made.name, made.tested_at) == (1, "of-the-isles", None)
    assert b"redential" not in client.get("/admin/", follow=True).content


def test_a_post_without_csrf_token_is_refused(ada: Client) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get(username="ada"))
    assert add(strict).status_code == 403
    add(ada)
    assert strict.post(f"{LIST}{only().pk}/test/").status_code == 403
    assert ada.get(f"{LIST}{only().pk}/test/").status_code == 405


# Creating and changing.


def test_the_kind_is_chosen_first(ada: Client) -> None:
    text = page(ada, f"{LIST}add/")
    for kind in KINDS.values():
        assert f'href="?kind={kind.key}">{kind.label}<' in text
    assert 'href="?kind=modal"' in page(ada, f"{LIST}add/?kind=nonsense")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_form_that_no_browser_fills_in(ada: Client, kind: str) -> None:
    text = page(ada, f"{LIST}add/?kind={kind}")
    for variable in KINDS[kind].variables:
        [field] = re.findall(
            rf'<(?:input|textarea)[^>]*name="variable_{variable.name}"[^>]*>', text
        )
        assert re.search(r'autocomplete="(off|new-password)"', field)
        if variable.secret and not variable.long:
            assert 'type="password"' in field


def test_entered_values_are_stored_and_never_shown(ada: Client) -> None:
    response = add(ada)
    assert response.status_code == 302
    result = only()
    assert open_credential(result) == {
        "MODAL_TOKEN_ID": "ak-typed-once",
        "MODAL_TOKEN_SECRET": "as-typed-once",
    }
    assert (result.kind, result.options, str(result.created_by)) == (
        "modal",
        {"app": "isles"},
        "ada",
    )
    pages = page(ada) + page(ada, LIST) + page(ada, f"{LIST}{result.pk}/history/")
    pages += page(ada, f"{LIST}{result.pk}/delete/")
    assert not any(secret in pages for secret in SECRETS)
    assert result.sealed not in pages
    assert "MODAL_TOKEN_ID, MODAL_TOKEN_SECRET" in pages
    assert "isles" in pages


def test_refused_values_are_never_shown(ada: Client) -> None:
    response = add(ada, name="")
    assert response.status_code == 200
    assert not any(secret.encode() in response.content for secret in SECRETS)
    response = add(
        ada,
        "kubernetes",
        name="k",
        variable_KUBECONFIG="token: in-a-kubeconfig\n",
        more_options="[1",
    )
    assert b"expected JSON" in response.content
    assert b"in-a-kubeconfig" not in response.content
    assert not Credential.objects.exists()


def test_an_empty_field_keeps_the_stored_value(ada: Client) -> None:
    add(ada)
    change = f"{LIST}{only().pk}/change/"
    response = ada.post(change, {"name": "renamed", "variable_MODAL_TOKEN_SECRET": "as-the-newer"})
    assert response.status_code == 302
    assert only().name == "renamed"
    assert only().options == {}
    assert open_credential(only()) == {
        "MODAL_TOKEN_ID": "ak-typed-once",
        "MODAL_TOKEN_SECRET": "as-the-newer",
    }


def test_an_optional_variable_can_be_removed(ada: Client) -> None:
    typed = {
        "variable_AWS_ACCESS_KEY_ID": "key-of-aws",
        "variable_AWS_SECRET_ACCESS_KEY": "secret-of-aws",
        "variable_AWS_SESSION_TOKEN": "token-of-aws",
    }
    add(ada, "store-s3", name="bucket", **typed)
    text = page(ada)
    assert 'name="clear_AWS_SESSION_TOKEN"' in text
    assert "clear_AWS_ACCESS_KEY_ID" not in text
    assert "clear_AWS_REGION" not in text
    ada.post(f"{LIST}{only().pk}/change/", {"name": "bucket", "clear_AWS_SESSION_TOKEN": "on"})
    assert only().fields == ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]


@pytest.mark.parametrize(
    ("kind", "typed", "expected"),
    [
        ("modal", {"variable_MODAL_TOKEN_ID": ""}, "This field is required."),
        ("modal", {"variable_MODAL_TOKEN_ID": "a\x07b"}, "expected printable characters"),
        ("modal", {"more_options": '{"app": "x"}'}, "app: use the separate field"),
        ("modal", {"more_options": "[]"}, "expected a JSON object"),
        ("modal", {"more_options": "[" * 5000}, "levels of nesting, found more"),
        ("modal", {"more_options": '{"a": NaN}'}, "expected finite numbers"),
        ("modal", {"more_options": r'{"a": "\u0000"}'}, "expected text without NUL"),
        ("modal", {"allowed_pool_options": '{"a":' * 5000}, "levels of nesting, found more"),
        ("huggingface", {"name": "h"}, "This field is required."),
        ("store-gs", {"name": "g", "variable_FSSPEC_GS": "{}"}, "expected a JSON key of type"),
        ("store-gs", {"name": "g", "variable_FSSPEC_GS": '{"a":' * 5000}, "expected a JSON key of"),
        ("store-az", {"name": "a"}, "found neither"),
        ("store-s3", {"name": "s", "option_test_uri": "gs://b"}, "expected s3://…, found gs://b"),
        ("store-s3", {"name": "s", "variable_AWS_ENDPOINT_URL": "here"}, "expected an address"),
        ("store-s3", {"name": "s", "option_max_session_s": "x"}, "Enter a whole number."),
        ("store-s3", {"name": "s", "option_assume_role_arn": "mine"}, "expected arn:aws:iam"),
    ],
)
def test_an_error_is_shown_at_its_field(
    ada: Client, kind: str, typed: dict[str, str], expected: str
) -> None:
    response = add(ada, kind, **typed)
    assert response.status_code == 200
    assert expected in response.content.decode().replace("&#x27;", "'")
    assert not Credential.objects.exists()


def test_a_bucket_s_scheme_follows_from_its_kind(ada: Client) -> None:
    key = {"type": "service_account", "private_key": "-----BEGIN", "client_email": "a@b"}
    add(
        ada, "store-gs", name="google", variable_FSSPEC_GS=json.dumps(key), option_test_uri="gs://b"
    )
    assert (only().kind, only().options) == ("store", {"scheme": "gs", "test_uri": "gs://b"})
    assert json.loads(open_credential(only())["FSSPEC_GS"]) == {"token": key}


def test_a_role_needs_no_keys(ada: Client) -> None:
    role = "arn:aws:iam::123456789012:role/replicas"
    add(ada, "store-s3", name="by role", option_assume_role_arn=role, option_max_session_s="7200")
    assert open_credential(only()) == {}
    assert only().options == {"scheme": "s3", "assume_role_arn": role, "max_session_s": 7200}


def test_a_duplicate_name_is_refused(ada: Client) -> None:
    add(ada)
    assert b"already exists" in add(ada).content


def test_a_credential_of_an_unknown_kind_can_be_replaced(ada: Client) -> None:
    made = Credential(name="odd", kind="elsewhere", options={"x": 1})
    save_credential(made, typed={"ODD_TOKEN": "odd-and-secret"}, actor=None)
    assert "odd-and-secret" not in page(ada)
    data = {"name": "odd", "variable_ODD_TOKEN": "newer", "more_options": '{"x": 2}'}
    assert ada.post(f"{LIST}{made.pk}/change/", data).status_code == 302
    assert open_credential(only()) == {"ODD_TOKEN": "newer"}
    assert only().options == {"x": 2}


# History.


def test_every_change_is_in_the_history_without_values(ada: Client) -> None:
    add(ada)
    pk = only().pk
    ada.post(f"{LIST}{pk}/change/", {"name": "m", "variable_MODAL_TOKEN_SECRET": "as-the-newer"})
    ada.post(f"{LIST}{pk}/delete/", {"post": "yes"})
    entries = LogEntry.objects.order_by("id")
    assert [entry.action_flag for entry in entries] == [1, 2, 3]
    reported = " ".join(f"{e.object_repr} {e.change_message}" for e in entries)
    assert "MODAL_TOKEN_SECRET" in reported
    assert not any(secret in reported for secret in (*SECRETS, "as-the-newer"))
    assert {str(entry.user) for entry in entries} == {"ada"}


# Deletion.


def test_a_used_credential_is_kept_with_the_reason(
    ada: Client, make_run: Callable[..., Any]
) -> None:
    add(ada)
    run = make_run()
    run.pools.update(credential=only())
    assert "delete_selected" not in page(ada, LIST)
    response = ada.post(f"{LIST}{only().pk}/delete/", {"post": "yes"}, follow=True)
    assert "it is used by Test run" in str(next(iter(response.context["messages"])))
    assert only().name == "our modal"
    assert not LogEntry.objects.filter(action_flag=3).exists()


# Tests.


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> w.FakeExecutor:
    made = w.FakeExecutor()
    monkeypatch.setattr("runs.actions.credentials.executor_of", lambda name, credential: made)
    monkeypatch.setattr("runs.actions.credentials.wait_loaded", lambda backends: set())
    return made


def test_the_test_button_shows_the_backend_s_answer(ada: Client, backend: w.FakeExecutor) -> None:
    add(ada)
    assert 'value="Test"' in page(ada)
    response = ada.post(f"{LIST}{only().pk}/test/", follow=True)
    assert [str(m) for m in response.context["messages"]] == ["our modal: a test's own backend"]
    assert "works. a test&#x27;s own backend" in response.content.decode()
    backend.away = "401: Token is revoked"
    response = ada.post(f"{LIST}{only().pk}/test/", follow=True)
    assert "does not work. 401: Token is revoked" in response.content.decode()
    assert LogEntry.objects.order_by("-id")[0].change_message == "Tested: does not work"


def test_the_action_tests_all_selected_credentials(ada: Client, backend: w.FakeExecutor) -> None:
    add(ada)
    add(ada, name="another")
    pks = [str(pk) for pk in Credential.objects.values_list("pk", flat=True)]
    data = {"action": "test", "_selected_action": pks}
    response = ada.post(LIST, data, follow=True)
    reported = [str(message) for message in response.context["messages"]]
    assert {"our modal: a test's own backend", "another: a test's own backend"} <= set(reported)
    assert set(Credential.objects.values_list("test_ok", flat=True)) == {True}


def test_a_bucket_is_tested_with_the_given_prefix(ada: Client, s3: Any) -> None:
    typed = {
        "variable_AWS_ACCESS_KEY_ID": s3.access_key,
        "variable_AWS_SECRET_ACCESS_KEY": s3.secret_key,
        "variable_AWS_ENDPOINT_URL": s3.endpoint_url,
    }
    add(ada, "store-s3", name="bucket", **typed)
    assert 'name="uri"' in page(ada)
    path = f"{LIST}{only().pk}/test/"
    response = ada.post(path, follow=True)
    assert "expected a prefix to test with" in response.content.decode()
    ada.post(path, {"uri": f"s3://{s3.bucket}/by-the-button"})
    assert only().test_ok, only().test_message
