"""Encryption, keys, rotation, and actions on credentials."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.utils import timezone

from dashboard.settings import _fernet_keys
from runs.actions import credentials as actions
from runs.actions.credentials import (
    InUse,
    delete_credential,
    save_credential,
    test_credential,
    used_by,
)
from runs.backends import parallel_calls
from runs.credentials import DecryptionError, open_credential
from runs.credentials.vault import seal, unseal
from runs.models import Credential, ExperimentTracker, ReplicaPool
from tests.runs import run_harness as w

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


def test_sealed_values_can_be_decrypted_but_not_read(modal: Credential) -> None:
    result = stored(modal)
    assert open_credential(result) == MODAL
    assert result.fields == sorted(MODAL)
    assert not any(value in result.sealed for value in MODAL.values())
    assert str(result.created_by) == "ada"


def test_no_credential_means_the_server_environment() -> None:
    assert open_credential(None) == {}


def test_wrong_key_is_refused_with_a_remedy(modal: Credential, settings: Any) -> None:
    settings.CREDENTIALS_KEYS = (new_key(), new_key())
    with pytest.raises(DecryptionError, match=r"'modal' cannot be opened.*the 2 of ARCH") as caught:
        open_credential(stored(modal))
    assert "manage.py reseal_credentials" in str(caught.value)
    assert modal.sealed not in str(caught.value)


def test_tampered_value_is_not_decrypted(modal: Credential) -> None:
    other = "B" if modal.sealed[-9] == "A" else "A"
    Credential.objects.update(sealed=modal.sealed[:-9] + other + modal.sealed[-8:])
    with pytest.raises(DecryptionError):
        open_credential(stored(modal))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("short", "found invalid base64 in key 1 of 1"),
        ("QUJD", "found 3 bytes in key 1 of 1"),
        (f"{new_key()}, *", "in key 2 of 2"),
    ],
    ids=["short", "few bytes", "second"],
)
def test_malformed_key_is_refused_without_printing_it(text: str, message: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=message) as caught:
        _fernet_keys(text)
    assert "QUJD" not in str(caught.value)


def test_keys_are_separated_by_commas_or_newlines() -> None:
    one, two = new_key(), new_key()
    assert _fernet_keys(f"{one}, {two}") == (one, two) == _fernet_keys(f"{one}\n{two}\n")


# Rotation.


def test_new_first_key_reseals_old_credentials(
    modal: Credential, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = settings.CREDENTIALS_KEYS[0], new_key()
    settings.CREDENTIALS_KEYS = (new, old)
    assert open_credential(stored(modal)) == MODAL
    settings.CREDENTIALS_KEYS = (old,)
    sealed = seal({"MLFLOW_TRACKING_TOKEN": "t"})
    tracker = ExperimentTracker.objects.create(
        name="safe", kind="mlflow", sealed=sealed, created_at=timezone.now()
    )
    settings.CREDENTIALS_KEYS = (new, old)
    call_command("reseal_credentials")
    assert "2 sealed with the first of 2 keys" in capsys.readouterr().out
    settings.CREDENTIALS_KEYS = (new,)
    assert open_credential(stored(modal)) == MODAL
    tracker.refresh_from_db()
    assert unseal(tracker.sealed, name="safe") == {"MLFLOW_TRACKING_TOKEN": "t"}


def test_credential_without_a_matching_key_is_named_and_unchanged(
    modal: Credential, settings: Any
) -> None:
    settings.CREDENTIALS_KEYS = (new_key(),)
    fresh = Credential(name="fresh", kind="huggingface")
    save_credential(fresh, typed={"HF_TOKEN": "hf_fresh"}, actor=None)
    with pytest.raises(CommandError, match="'modal' cannot be opened"):
        call_command("reseal_credentials")
    assert stored(modal).sealed == modal.sealed
    assert open_credential(stored(fresh)) == {"HF_TOKEN": "hf_fresh"}


# Storing.


def test_only_entered_values_are_replaced(modal: Credential) -> None:
    save_credential(stored(modal), typed={"MODAL_TOKEN_SECRET": "as-newer"}, actor=None)
    assert open_credential(stored(modal)) == {**MODAL, "MODAL_TOKEN_SECRET": "as-newer"}
    save_credential(stored(modal), typed={}, cleared={"MODAL_TOKEN_ID"}, actor=None)
    assert open_credential(stored(modal)) == {"MODAL_TOKEN_SECRET": "as-newer"}
    assert stored(modal).fields == ["MODAL_TOKEN_SECRET"]
    assert str(stored(modal).created_by) == "ada"


def test_undecryptable_credential_is_replaced_completely(modal: Credential, settings: Any) -> None:
    settings.CREDENTIALS_KEYS = (new_key(),)
    save_credential(stored(modal), typed={"MODAL_TOKEN_ID": "ak-new"}, actor=None)
    assert open_credential(stored(modal)) == {"MODAL_TOKEN_ID": "ak-new"}


def test_changed_credential_is_untested_and_resets_waiting_pools(
    modal: Credential, make_run: Callable[..., Any]
) -> None:
    run = make_run()
    Credential.objects.update(test_ok=True, test_message="fine")
    waits = {"requires_intervention": True, "failures": 5}
    ReplicaPool.objects.filter(run=run).update(backend="modal", credential=modal, **waits)
    save_credential(stored(modal), typed={"MODAL_TOKEN_SECRET": "as-newer"}, actor=None)
    [pool] = run.pools.all()
    assert (pool.requires_intervention, pool.failures) == (False, 0)
    assert (stored(modal).test_ok, stored(modal).test_message) == (None, "")


def test_used_credential_is_not_deleted(modal: Credential, make_run: Callable[..., Any]) -> None:
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
    monkeypatch.setattr("runs.actions.credentials.wait_loaded", lambda backends: set())
    return made


def test_backend_message_is_stored(modal: Credential, backend: w.FakeExecutor) -> None:
    assert test_credential(modal).ok
    result = stored(modal)
    assert (result.test_ok, result.test_message) == (True, "a test's own backend")
    assert result.tested_at is not None
    backend.away = "Token validation failed"
    assert not test_credential(modal).ok
    assert (stored(modal).test_ok, stored(modal).test_message) == (False, backend.away)


def test_successful_test_resets_pools_and_a_failed_one_does_not(
    modal: Credential, backend: w.FakeExecutor, make_run: Callable[..., Any]
) -> None:
    run = make_run()
    run.pools.update(backend="modal", credential=modal, requires_intervention=True)
    backend.away = "no"
    test_credential(modal)
    assert run.pools.get().requires_intervention
    backend.away = ""
    test_credential(modal)
    assert not run.pools.get().requires_intervention


def test_result_is_not_stored_for_a_credential_changed_meanwhile(
    modal: Credential, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(*_: Any, **__: Any) -> actions.Tested:
        save_credential(stored(modal), typed={"MODAL_TOKEN_SECRET": "as-newer"}, actor=None)
        return actions.Tested(ok=True, message="the old one works")

    monkeypatch.setattr("runs.actions.credentials.call", change)
    assert test_credential(modal).message == "the old one works"
    assert stored(modal).test_ok is None


def test_an_endpoint_that_never_answers_holds_no_worker(
    modal: Credential, backend: w.FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(backend, "check", lambda: str(answered.wait(60)))
    monkeypatch.setattr("runs.actions.credentials.PATIENCE_S", 0.0)
    monkeypatch.setattr(parallel_calls, "PER_PLACE", 2)
    try:
        messages = [test_credential(modal).message for _ in range(3)]
    finally:
        answered.set()
    assert messages[:2] == ["no answer within 0 s"] * 2
    assert "2 requests to credential" in messages[2]
    assert stored(modal).test_ok is False


def test_a_broken_client_fails_the_test_without_its_message(
    modal: Credential, backend: w.FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> str:
        raise KeyError("anything, such as a header")

    monkeypatch.setattr(backend, "check", check)
    assert test_credential(modal).message == "could not be tested: KeyError"
    assert stored(modal).test_ok is False


def test_secret_in_a_backend_message_is_redacted(
    modal: Credential, backend: w.FakeExecutor
) -> None:
    backend.away = f"illegal header value {MODAL['MODAL_TOKEN_SECRET']!r}"
    assert test_credential(modal).message == "illegal header value '********'"
    assert stored(modal).test_message == "illegal header value '********'"


def test_undecryptable_credential_fails_its_test_with_the_reason(
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


def test_bucket_credential_is_tested_on_a_prefix(s3: Any) -> None:
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


def test_bucket_credential_needs_a_prefix_of_its_kind() -> None:
    made = store()
    assert test_credential(made).message == "expected a prefix to test with, found none"
    assert "to be in s3://, found gs://b/p" in test_credential(made, "gs://b/p").message


def test_bucket_credential_resets_the_pools_of_its_runs(make_run: Callable[..., Any]) -> None:
    run = make_run()
    made = store()
    type(run).objects.update(store_credential=made)
    run.pools.update(requires_intervention=True)
    save_credential(made, typed={"AWS_SECRET_ACCESS_KEY": "newer-secret"}, actor=None)
    assert not run.pools.get().requires_intervention
    assert used_by(made) == ["Test run"]


def test_sealing_twice_gives_different_text(modal: Credential) -> None:
    assert seal(MODAL) != seal(MODAL)


def test_key_is_created_once_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dashboard import settings as module

    monkeypatch.setattr(module, "VAR_DIR", tmp_path)
    monkeypatch.delenv("ARCHIPELAGO_CREDENTIALS_KEY", raising=False)

    def stored_key() -> str:
        return module._persistent("credentials_key", "ARCHIPELAGO_CREDENTIALS_KEY", new_key)

    first = stored_key()
    assert stored_key() == first
    assert (tmp_path / "credentials_key").stat().st_mode & 0o777 == 0o600
    assert _fernet_keys(first) == (first,)
    monkeypatch.setenv("ARCHIPELAGO_CREDENTIALS_KEY", "given")
    assert stored_key() == "given"
