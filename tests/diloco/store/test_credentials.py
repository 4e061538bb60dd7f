"""A store opened with a credential uses only that credential, not the process's environment.

Every test adds environment variables that would redirect the client, or grant access where the
credential does not.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import fsspec.config
import pytest

from diloco.preflight import preflight
from diloco.store import credentials
from diloco.store.base import Store, StoreDenied
from diloco.store.fsspec import FsspecStore
from diloco.store.open import open_store
from tests.bucket_servers import BucketServer
from tests.servers import S3Server

NOWHERE = "http://127.0.0.1:1"
Open = Callable[..., Store]
STRAY = {
    "AWS_ACCESS_KEY_ID": "stray",
    "AWS_SECRET_ACCESS_KEY": "stray",
    "AWS_SESSION_TOKEN": "stray",
    "AWS_ENDPOINT_URL": NOWHERE,
    "AWS_ENDPOINT_URL_S3": NOWHERE,
    "AWS_DEFAULT_REGION": "eu-north-1",
    "AWS_SKIP_SIGNATURE": "true",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
    "STORAGE_EMULATOR_HOST": NOWHERE,
    "AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true",
    "AZURE_STORAGE_ACCOUNT_KEY": "c3RyYXk=",
    "HF_TOKEN": "hf_stray",
}
"""Variables that would redirect every client."""

ENGINES: dict[str, Open] = {"obstore": open_store, "s3fs": FsspecStore}


@pytest.fixture
def stray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STRAY.items():
        monkeypatch.setenv(name, value)
    # gcsfs reads it on import; otherwise each new bucket of the test server takes a minute.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    strays = {"key": "stray", "secret": "stray", "token": "stray", "endpoint_url": NOWHERE}
    monkeypatch.setitem(fsspec.config.conf, "s3", strays)
    monkeypatch.setitem(fsspec.config.conf, "gs", {"endpoint_url": NOWHERE})
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": NOWHERE, "token": "hf_stray"})


@pytest.mark.parametrize("engine", ENGINES)
def test_s3_uses_only_the_credential(s3: S3Server, stray: None, engine: str) -> None:
    store = ENGINES[engine](f"s3://{s3.bucket}/access-{engine}", environment=s3.env)
    store.put("a/b", b"mine")
    assert store.create("a/b", b"theirs") is False
    assert store.get("a/b") == b"mine"
    assert [info.key for info in store.list("a/")] == ["a/b"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_credential_does_not_fall_back_to_the_environment(
    s3: S3Server, s3_uri: str, engine: str
) -> None:
    make = ENGINES[engine]
    make(s3_uri).put("a", b"the process may")
    wrong = {**s3.env, "AWS_SECRET_ACCESS_KEY": "wrong"}
    with pytest.raises(StoreDenied, match=r"Signature|Forbidden"):
        make(s3_uri, environment=wrong).get("a")
    with pytest.raises(StoreDenied, match="expected AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"):
        make(s3_uri, environment={})


def test_two_credentials_for_one_uri_are_independent(s3: S3Server) -> None:
    uri = f"s3://{s3.bucket}/side-by-side"
    right = open_store(uri, environment=s3.env)
    wrong = open_store(uri, environment={**s3.env, "AWS_SECRET_ACCESS_KEY": "wrong"})
    for n in range(3):
        right.put(f"a/{n}", b"x")
        with pytest.raises(StoreDenied):
            wrong.put(f"a/{n}", b"y")
        assert right.get(f"a/{n}") == b"x"


def test_gcs_uses_the_endpoint_of_the_credential(gcs: BucketServer, stray: None) -> None:
    store = open_store(f"{gcs.uri}/access", environment=gcs.env)
    assert store.create("a", b"mine")
    assert store.get("a") == b"mine"


def test_azure_uses_only_the_credential(azure: BucketServer, stray: None) -> None:
    report = preflight(f"{azure.uri}/access", quick=True, environment=azure.env)
    assert report.missing == []


def test_the_hub_uses_only_the_credential(hub: BucketServer, stray: None) -> None:
    store = open_store(f"{hub.uri}/access", environment=hub.env)
    store.put("a", b"mine")
    assert store.get("a") == b"mine"
    with pytest.raises(StoreDenied):
        open_store(f"{hub.uri}/access", environment={**hub.env, "HF_TOKEN": "hf_other"}).get("a")


def test_the_default_endpoint_is_the_service(stray: None) -> None:
    key = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    options = credentials.fsspec_options("s3://b/p", {**key, "AWS_REGION": "cn-north-1"})
    assert options["endpoint_url"] == "https://s3.cn-north-1.amazonaws.com.cn"
    assert options["token"] is None
    assert credentials.fsspec_options("gs://b", {})["endpoint_url"].endswith("googleapis.com")
    assert credentials.fsspec_options("hf://datasets/a/b", {})["token"] is False
    plain = credentials.s3_access(key)
    assert (plain.region, plain.endpoint_url) == ("us-east-1", None)
    assert "AWS" not in repr(plain)
    assert "'k'" not in repr(plain)


def test_azure_keys_become_connection_strings() -> None:
    account = {"AZURE_STORAGE_ACCOUNT_NAME": "isle"}
    by_key = credentials.fsspec_options("az://c/p", {**account, "AZURE_STORAGE_ACCOUNT_KEY": "a="})
    assert by_key["connection_string"] == (
        "BlobEndpoint=https://isle.blob.core.windows.net;AccountName=isle;AccountKey=a="
    )
    shared = {**account, "AZURE_STORAGE_SAS_TOKEN": "?sv=1&sig=x"}
    assert credentials.fsspec_options("az://c/p", shared)["connection_string"].endswith(
        ";SharedAccessSignature=sv=1&sig=x"
    )
    with pytest.raises(StoreDenied, match="expected AZURE_STORAGE_CLIENT_ID"):
        credentials.fsspec_options("az://c/p", account)


def test_a_principal_is_refused_if_the_client_would_use_the_environment(stray: None) -> None:
    principal = {
        "AZURE_STORAGE_ACCOUNT_NAME": "isle",
        "AZURE_STORAGE_CLIENT_ID": "i",
        "AZURE_STORAGE_CLIENT_SECRET": "s",
        "AZURE_STORAGE_TENANT_ID": "11111111-1111-1111-1111-111111111111",
    }
    with pytest.raises(StoreDenied, match="no AZURE_STORAGE_CONNECTION_STRING in its"):
        open_store("az://c/p", environment=principal)


def test_folders_take_no_credential(tmp_path: Path) -> None:
    for uri in (str(tmp_path), tmp_path.as_uri()):
        with pytest.raises(StoreDenied, match="found a folder"):
            open_store(uri, environment={})
    with pytest.raises(StoreDenied, match="expected a URI of s3, s3a, gs"):
        open_store("memory://x", environment={})
    with pytest.raises(StoreDenied, match="expected a JSON object"):
        credentials.fsspec_options("gs://b", {"FSSPEC_GS": "no json"})


class Tokens(ThreadingHTTPServer):
    """Google's token endpoint: returns an access token for a signed assertion."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Token)
        self.requests: list[dict[str, list[str]]] = []


class _Token(BaseHTTPRequestHandler):
    server: Tokens

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(parse_qs(body.decode()))
        answer = json.dumps({"access_token": "minted", "expires_in": 3600}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def tokens() -> Iterator[Tokens]:
    with Tokens() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        with contextlib.suppress(OSError):
            server.shutdown()


def service_account(token_uri: str) -> dict[str, str]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return {
        "type": "service_account",
        "project_id": "isles",
        "private_key_id": "1",
        "private_key": pem.decode(),
        "client_email": "replica@isles.iam.gserviceaccount.com",
        "token_uri": token_uri,
    }


def test_a_service_account_key_is_passed_by_content(
    gcs: BucketServer, tokens: Tokens, stray: None
) -> None:
    key = service_account(f"http://127.0.0.1:{tokens.server_address[1]}/token")
    environment = {**gcs.env, "FSSPEC_GS": json.dumps({"token": key})}
    store = open_store(f"{gcs.uri}/account", environment=environment)
    store.put("a", b"mine")
    assert store.get("a") == b"mine"
    [request] = tokens.requests
    assert request["assertion"][0].count(".") == 2
