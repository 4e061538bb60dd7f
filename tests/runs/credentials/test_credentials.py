"""Sealing, keys, rotation, and what people do with credentials."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command

from dashboard.settings import _fernet_keys
from runs.actions.credentials import (
    InUse,
    delete_credential,
    save_credential,
    test_credential,
    used_by,
)
from runs.credentials import CannotOpen, open_credential
from runs.credentials.vault import seal
from runs.models import Credential, ReplicaPool
from tests.runs import world as w

pytestmark = pytest.mark.django_db
MODAL = {"MODAL_TOKEN_ID": "ak-sealed-away", "MODAL_TOKEN_SECRET": "as-sealed-away"}


@pytest.fixture
def modal() -> Credential:
    made = Credential(name="modal", kind="modal")
    save_credential(made, typed=MODAL, actor=w.person("ada", "admin"))
    return made


def stored(credential: Credential) -> Credential:
    return Credential.objects.get(pk=credential.pk)


def new_key() -> str:
    return Fernet.generate_key().decode()


# Sealing.


def test_what_is_sealed_can_be_opened_and_not_be_read(modal: Credential) -> None:
    found = stored(modal)
    assert open_credential(found) == MODAL
    assert found.fields == sorted(MODAL)
    assert not any(value in found.sealed for value in MODAL.values())
    assert str(found.created_by) == "ada"


def test_no_credential_is_the_server_s_own_environment() -> None:
    assert open_credential(None) == {}


def test_another_key_does_not_open_it_and_what_to_do_is_said(
    modal: Credential, settings: Any
) -> None:
    settings.CREDENTIALS_KEYS = (new_key(), new_key())
    with pytest.raises(CannotOpen, match=r"'modal' cannot be opened.*the 2 of ARCH") as caught:
        open_credential(stored(modal))
    assert "manage.py reseal_credentials" in str(caught.value)
    assert modal.sealed not in str(caught.value)


def test_a_sealed_value_that_was_tampered_with_is_not_opened(modal: Credential) -> None:
    Credential.objects.update(sealed=modal.sealed[:-9] + "A" + modal.sealed[-8:])
    with pytest.raises(CannotOpen):
        open_credential(stored(modal))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("short", "found no base64 in key 1 of 1"),
        ("QUJD", "found 3 bytes in key 1 of 1"),
        (f"{new_key()}, *", "in key 2 of 2"),
    ],
)
def test_a_key_of_another_form_is_refused_without_being_told(text: str, said: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=said) as caught:
        _fernet_keys(text)
    assert "QUJD" not in str(caught.value)


def test_keys_are_read_with_commas_or_lines_between() -> None:
    one, two = new_key(), new_key()
    assert _fernet_keys(f"{one}, {two}") == (one, two) == _fernet_keys(f"{one}\n{two}\n")


# Rotation.


def test_a_new_key_in_front_reseals_what_the_old_one_sealed(
    modal: Credential, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = settings.CREDENTIALS_KEYS[0], new_key()
    settings.CREDENTIALS_KEYS = (new, old)
    assert open_credential(stored(modal)) == MODAL
    call_command("reseal_credentials")
    assert "1 sealed with the first of 2 keys" in capsys.readouterr().out
    settings.CREDENTIALS_KEYS = (new,)
    assert open_credential(stored(modal)) == MODAL


def test_what_no_key_opens_is_named_and_left(modal: Credential, settings: Any) -> None:
    settings.CREDENTIALS_KEYS = (new_key(),)
    fresh = Credential(name="fresh", kind="huggingface")
    save_credential(fresh, typed={"HF_TOKEN": "hf_fresh"}, actor=None)
    with pytest.raises(CommandError, match="'modal' cannot be opened"):
        call_command("reseal_credentials")
    assert stored(modal).sealed == modal.sealed
    assert open_credential(stored(fresh)) == {"HF_TOKEN": "hf_fresh"}


# Storing.


def test_only_what_is_typed_anew_is_replaced(modal: Credential) -> None:
    save_credential(stored(modal), typed={"MODAL_TOKEN_SECRET": "as-newer"}, actor=None)
    assert open_credential(stored(modal)) == {**MODAL, "MODAL_TOKEN_SECRET": "as-newer"}
    save_credential(stored(modal), typed={}, cleared={"MODAL_TOKEN_ID"}, actor=None)
    assert open_credential(stored(modal)) == {"MODAL_TOKEN_SECRET": "as-newer"}
    assert stored(modal).fields == ["MODAL_TOKEN_SECRET"]
    assert str(stored(modal).created_by) == "ada"


def test_what_cannot_be_opened_is_replaced_as_a_whole(modal: Credential, settings: Any) -> None:
    settings.CREDENTIALS_KEYS = (new_key(),)
    save_credential(stored(modal), typed={"MODAL_TOKEN_ID": "ak-new"}, actor=None)
    assert open_credential(stored(modal)) == {"MODAL_TOKEN_ID": "ak-new"}


def test_a_changed_credential_is_untested_and_lets_go_on_what_waited_for_it(
    modal: Credential, make_run: Callable[..., Any]
) -> None:
    run = make_run()
    Credential.objects.update(test_ok=True, test_message="fine")
    waits = {"needs_person": True, "failures": 5}
    ReplicaPool.objects.filter(run=run).update(backend="modal", credential=modal, **waits)
    save_credential(stored(modal), typed={"MODAL_TOKEN_SECRET": "as-newer"}, actor=None)
    [pool] = run.pools.all()
    assert (pool.needs_person, pool.failures) == (False, 0)
    assert (stored(modal).test_ok, stored(modal).test_message) == (None, "")


def test_one_that_is_used_is_not_deleted(modal: Credential, make_run: Callable[..., Any]) -> None:
    run = make_run()
    run.pools.update(backend="modal", credential=modal)
    assert used_by(modal) == ["Test run"]
    with pytest.raises(InUse, match=r"used by Test run\. .* revoke it"):
        delete_credential(stored(modal))
    run.pools.update(credential=None)
    delete_credential(stored(modal))
    assert not Credential.objects.exists()


# Testing.


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> w.FakeExecutor:
    made = w.FakeExecutor()
    monkeypatch.setattr("runs.actions.credentials.executor_of", lambda name, credential: made)
    return made


def test_the_backend_s_own_words_are_kept(modal: Credential, backend: w.FakeExecutor) -> None:
    assert test_credential(modal).ok
    found = stored(modal)
    assert (found.test_ok, found.test_message) == (True, "a test's own backend")
    assert found.tested_at is not None
    backend.away = "Token validation failed"
    assert not test_credential(modal).ok
    assert (stored(modal).test_ok, stored(modal).test_message) == (False, backend.away)


def test_a_test_that_works_lets_go_on_and_one_that_fails_does_not(
    modal: Credential, backend: w.FakeExecutor, make_run: Callable[..., Any]
) -> None:
    run = make_run()
    run.pools.update(backend="modal", credential=modal, needs_person=True)
    backend.away = "no"
    test_credential(modal)
    assert run.pools.get().needs_person
    backend.away = ""
    test_credential(modal)
    assert not run.pools.get().needs_person


def test_the_answer_is_not_written_to_one_that_was_changed_meanwhile(
    modal: Credential, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(w.FakeExecutor):
        def check(self) -> str:
            save_credential(stored(modal), typed={"MODAL_TOKEN_SECRET": "as-newer"}, actor=None)
            return "the old one works"

    monkeypatch.setattr("runs.actions.credentials.executor_of", lambda name, credential: Slow())
    test_credential(modal)
    assert stored(modal).test_ok is None


def test_what_the_backend_repeats_of_a_secret_is_struck_out(
    modal: Credential, backend: w.FakeExecutor
) -> None:
    backend.away = f"illegal header value {MODAL['MODAL_TOKEN_SECRET']!r}"
    assert test_credential(modal).message == "illegal header value '********'"
    assert stored(modal).test_message == "illegal header value '********'"


def test_one_that_cannot_be_opened_fails_its_test_with_the_reason(
    modal: Credential, settings: Any
) -> None:
    settings.CREDENTIALS_KEYS = (new_key(),)
    assert "cannot be opened" in test_credential(modal).message
    assert stored(modal).test_ok is False


# Buckets.


def store(**options: Any) -> Credential:
    made = Credential(name="bucket", kind="store", options={"scheme": "s3", **options})
    typed = {"AWS_ACCESS_KEY_ID": "k" * 8, "AWS_SECRET_ACCESS_KEY": "s" * 8}
    save_credential(made, typed=typed, actor=None)
    return made


def test_a_bucket_s_is_tested_on_a_prefix(s3: Any) -> None:
    made = store()
    save_credential(made, typed={**s3.env, "AWS_REGION": "us-east-1"}, actor=None)
    tested = test_credential(made, f"s3://{s3.bucket}/credential")
    assert tested.ok, tested.message
    assert tested.message.startswith(f"s3://{s3.bucket}/credential: can be written")
    save_credential(made, typed={"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, actor=None)
    tested = test_credential(made, f"s3://{s3.bucket}/credential")
    assert not tested.ok
    assert "cannot write" in tested.message
    assert "needs s3:PutObject" in tested.message


def test_a_bucket_s_needs_a_prefix_of_its_kind() -> None:
    made = store()
    assert test_credential(made).message == "expected a prefix to test with, found none"
    assert "to be in s3://, found gs://b/p" in test_credential(made, "gs://b/p").message


def test_a_bucket_s_lets_go_on_the_pools_of_its_runs(make_run: Callable[..., Any]) -> None:
    run = make_run()
    made = store()
    type(run).objects.update(store_credential=made)
    run.pools.update(needs_person=True)
    save_credential(made, typed={"AWS_SECRET_ACCESS_KEY": "newer-secret"}, actor=None)
    assert not run.pools.get().needs_person
    assert used_by(made) == ["Test run"]


def test_sealing_twice_gives_other_text(modal: Credential) -> None:
    assert seal(MODAL) != seal(MODAL)


def test_the_key_is_made_once_and_is_its_owner_s_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dashboard import settings as module

    monkeypatch.setattr(module, "VAR_DIR", tmp_path)
    monkeypatch.delenv("ARCHIPELAGO_CREDENTIALS_KEY", raising=False)

    def kept() -> str:
        return module._kept("credentials_key", "ARCHIPELAGO_CREDENTIALS_KEY", new_key)

    first = kept()
    assert kept() == first
    assert (tmp_path / "credentials_key").stat().st_mode & 0o777 == 0o600
    assert _fernet_keys(first) == (first,)
    monkeypatch.setenv("ARCHIPELAGO_CREDENTIALS_KEY", "given")
    assert kept() == "given"
