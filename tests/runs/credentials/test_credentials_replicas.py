"""Credentials with which replicas and the server open a rendezvous."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.store.base import StoreDenied
from diloco.store.open import open_store
from executors.base import AccountError
from runs.actions.credentials import save_credential
from runs.credentials import check_store, replica_secrets
from runs.credentials.replica_env import server_environment
from runs.ingest.stores import store_for
from runs.models import Credential, Run

pytestmark = pytest.mark.django_db
MakeRun = Callable[..., Any]
S3 = {"AWS_ACCESS_KEY_ID": "key-of-a-store", "AWS_SECRET_ACCESS_KEY": "secret-of-a-store"}


def credential(name: str = "bucket", scheme: str = "s3", **typed: str) -> Credential:
    made = Credential(name=name, kind="store", options={"scheme": scheme})
    save_credential(made, typed=typed or S3, actor=None)
    return made


def at(run: Any, uri: str, *, backend: str = "modal", store: Credential | None = None) -> Any:
    Run.objects.filter(pk=run.pk).update(rendezvous=uri, store_credential=store)
    run.pools.update(backend=backend)
    return Run.objects.get(pk=run.pk)


def given(run: Any) -> Any:
    return replica_secrets(run, run.replicas.select_related("pool").first(), lifetime_s=60.0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control plane that has secrets of many kinds in its environment."""
    for name, value in {
        **{name: f"the-server-s-{name}" for name in S3},
        "AWS_DEFAULT_REGION": "eu-north-1",
        "AWS_PROFILE": "admin",
        "AWS_ENDPOINT_URL_SAGEMAKER": "http://elsewhere",
        "DATABASE_URL": "postgres://u:of-the-database@h/d",
        "REDIS_URL": "redis://:of-the-broker@h/0",
        "ARCHIPELAGO_SECRET_KEY": "of-django",
        "ARCHIPELAGO_CREDENTIALS_KEY": "of-credentials",
        "AZURE_STORAGE_CONNECTION_STRING": "AccountName=a;AccountKey=of-azure",
        "HF_TOKEN": "hf_of_the_server",
        "MODAL_TOKEN_SECRET": "as-of-the-server",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)


# From the server's own environment.


def test_only_variables_of_the_bucket_kind_are_sent(make_run: MakeRun, server: None) -> None:
    opened = given(at(make_run(), "s3://bucket/run"))
    assert dict(opened.environment) == {
        **{name: f"the-server-s-{name}" for name in S3},
        "AWS_DEFAULT_REGION": "eu-north-1",
    }
    assert opened.lifetime_s is None
    assert "the-server-s" not in repr(opened)
    opened = given(at(make_run(), "az://c/run"))
    assert set(opened.environment) == {"AZURE_STORAGE_CONNECTION_STRING"}
    opened = given(at(make_run(), "hf://datasets/a/b"))
    assert "HF_TOKEN" in opened.environment
    assert not any("AWS" in name for name in opened.environment)


def test_folder_and_local_backend_need_no_variables(make_run: MakeRun, server: None) -> None:
    assert not given(make_run()).environment
    assert not given(at(make_run(), "s3://bucket/run", backend="local")).environment


def test_sagemaker_role_is_used_for_amazon_buckets_only(
    make_run: MakeRun, server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = at(make_run(), "s3://bucket/run", backend="sagemaker")
    assert not given(run).environment
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://store.example")
    assert given(run).environment["AWS_ENDPOINT_URL"] == "https://store.example"
    assert "AWS_SECRET_ACCESS_KEY" in given(run).environment


def test_content_of_the_google_key_file_is_sent(tmp_path: Path) -> None:
    key = {"type": "service_account", "private_key": "-----BEGIN"}
    path = tmp_path / "key.json"
    path.write_text(json.dumps(key))
    environ = {"GOOGLE_APPLICATION_CREDENTIALS": str(path), "AWS_ACCESS_KEY_ID": "k"}
    result = server_environment("gs", environ)
    assert json.loads(result.pop("FSSPEC_GS")) == {"token": key}
    assert result == {}
    path.write_text(json.dumps({"type": "external_account"}))
    with pytest.raises(AccountError, match="'external_account', which works on this machine only"):
        server_environment("gs", environ)
    with pytest.raises(AccountError, match="No such file"):
        server_environment("gs", {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere.json"})


# From a credential.


@pytest.mark.parametrize("backend", ["local", "modal", "sagemaker"])
def test_credential_replaces_the_server_environment(
    make_run: MakeRun, server: None, backend: str
) -> None:
    opened = given(at(make_run(), "s3://b/run", backend=backend, store=credential()))
    assert dict(opened.environment) == S3


def test_replicas_with_their_own_access_get_no_variables(make_run: MakeRun, server: None) -> None:
    store = credential()
    store.options["replicas_by_role"] = True
    store.save()
    assert not given(at(make_run(), "s3://b/run", store=store)).environment


def test_credential_opens_only_its_kind_of_bucket() -> None:
    store = credential()
    assert check_store(store, "s3://bucket/run") == ""
    assert "to be in s3://, found gs://b" in check_store(store, "gs://b")
    assert "to be in s3://, found file:///tmp" in check_store(store, "file:///tmp")
    modal = Credential(name="modal", kind="modal")
    assert "expected a credential for a bucket" in check_store(modal, "s3://b")


# The server's own stores.


def test_two_runs_of_one_uri_use_their_own_credentials(
    make_run: MakeRun, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in s3.env:
        monkeypatch.delenv(name, raising=False)
    uri = f"s3://{s3.bucket}/two-credentials"
    right = at(make_run(), uri, store=credential("right", **s3.env))
    wrong = at(
        make_run(),
        uri,
        store=credential("wrong", **{**s3.env, "AWS_SECRET_ACCESS_KEY": "wrong-secret"}),
    )
    store_for(right).put("a", b"mine")
    with pytest.raises(StoreDenied):
        store_for(wrong).get("a")
    assert store_for(right).get("a") == b"mine"
    assert store_for(right) is store_for(Run.objects.get(pk=right.pk))


def test_changed_credential_gets_a_new_store(make_run: MakeRun, s3: Any) -> None:
    store = credential(**{**s3.env, "AWS_SECRET_ACCESS_KEY": "wrong-secret"})
    run = at(make_run(), f"s3://{s3.bucket}/changed", store=store)
    with pytest.raises(StoreDenied):
        store_for(run).put("a", b"x")
    save_credential(store, typed={"AWS_SECRET_ACCESS_KEY": s3.secret_key}, actor=None)
    store_for(Run.objects.get(pk=run.pk)).put("a", b"x")
    assert open_store(run.rendezvous, environment=s3.env).get("a") == b"x"


def test_undecryptable_credential_denies_the_store(make_run: MakeRun, settings: Any) -> None:
    run = at(make_run(), "s3://b/run", store=credential())
    settings.CREDENTIALS_KEYS = ("A" * 43 + "=",)
    with pytest.raises(StoreDenied, match="'bucket' cannot be opened"):
        store_for(run)
    with pytest.raises(AccountError, match="'bucket' cannot be opened"):
        given(run)


def test_credential_with_only_a_role_uses_the_server_identity(
    make_run: MakeRun, s3_uri: str
) -> None:
    made = Credential(name="role", kind="store", options={"scheme": "s3"})
    save_credential(made, typed={}, actor=None)
    store_for(at(make_run(), s3_uri, store=made)).put("a", b"x")
