"""Cluster and identity: kubeconfigs of every kind, and the service account of a pod."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import ssl
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from executors.base import AccountError
from executors.kubernetes.auth import connection
from executors.kubernetes.client import Cluster
from executors.kubernetes.executor import KubernetesExecutor
from tests.emulators.kubernetes import TOKEN, USER, KubernetesCluster
from tests.executors.harnesses import config

SERVER = "https://192.0.2.1:6443"


def kubeconfig(**user: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "one",
        "clusters": [{"name": "c", "cluster": {"server": SERVER}}],
        "users": [{"name": "u", "user": user or {"token": "t0k3n"}}],
        "contexts": [
            {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "first"}},
            {"name": "two", "context": {"cluster": "c", "user": "u"}},
        ],
    }


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump, lambda c: json.dumps(c, indent=1)])
def test_the_content_of_a_kubeconfig(write: Any) -> None:
    made, namespace = connection(write(kubeconfig()), environ={})
    assert (made.host, namespace) == (SERVER, "first")
    assert made.api_key["BearerToken"] == "Bearer t0k3n"
    _, namespace = connection(write(kubeconfig()), context="two", environ={})
    assert namespace == "default"


def test_the_path_of_a_kubeconfig(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(kubeconfig()))
    for credential, environ in ((str(path), {}), ("", {"KUBECONFIG": str(path)})):
        made, namespace = connection(credential, environ=environ)
        assert (made.host, namespace) == (SERVER, "first")
    _, namespace = connection(str(path), context="two", environ={})
    assert namespace == "default"


def test_a_stored_kubeconfig_precedes_the_environment(tmp_path: Path) -> None:
    other = kubeconfig()
    other["clusters"][0]["cluster"]["server"] = "https://192.0.2.2"
    (tmp_path / "config").write_text(yaml.safe_dump(other))
    made, _ = connection(json.dumps(kubeconfig()), environ={"KUBECONFIG": str(tmp_path / "config")})
    assert made.host == SERVER


def test_nothing_is_set_for_the_process() -> None:
    from kubernetes.client import Configuration

    before = Configuration.get_default_copy().host
    connection(json.dumps(kubeconfig()), environ={})
    assert Configuration.get_default_copy().host == before != SERVER


@pytest.mark.parametrize(
    "user",
    [
        {"exec": {"command": "touch", "args": ["ran"]}},
        {"auth-provider": {"name": "gcp"}},
        {"tokenFile": "/etc/hostname"},
        {"client-certificate": "/etc/hostname", "client-key": "/etc/hostname"},
    ],
    ids=lambda user: next(iter(user)),
)
def test_a_stored_kubeconfig_runs_nothing_and_reads_no_file(
    user: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AccountError, match=f"{next(iter(user))}.* in user 'u'"):
        connection(json.dumps(kubeconfig(**user)), environ={})
    assert list(tmp_path.iterdir()) == []


def test_a_stored_kubeconfig_names_no_authority_of_this_machine() -> None:
    given = kubeconfig()
    given["clusters"][0]["cluster"]["certificate-authority"] = "/etc/ssl/certs/x.pem"
    with pytest.raises(AccountError, match="certificate-authority in cluster 'c'"):
        connection(json.dumps(given), environ={})


@pytest.mark.parametrize(
    ("credential", "message"),
    [
        ("apiVersion: v1\nkind: Config\n", "KUBECONFIG: "),
        ("{", "expected YAML"),
        ('apiVersion: v1\nusers: [{name: s3cr3t, user: "', "expected YAML"),
        ("- a\n- b\n", "expected a kubeconfig"),
        ("/nowhere/config", "found no file /nowhere/config"),
    ],
)
def test_an_invalid_kubeconfig_is_an_error_without_its_content(
    credential: str, message: str
) -> None:
    with pytest.raises(AccountError, match=message) as caught:
        connection(credential, environ={})
    assert "s3cr3t" not in str(caught.value)


def test_an_unknown_context_is_named() -> None:
    with pytest.raises(AccountError, match="three"):
        connection(json.dumps(kubeconfig()), context="three", environ={})


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_several_clusters_at_once() -> None:
    """The client shares certificate files between threads, and returns a path before the file is
    written."""

    def load(text: str) -> bytes:
        given = kubeconfig()
        data = base64.b64encode(text.encode()).decode()
        given["clusters"][0]["cluster"]["certificate-authority-data"] = data
        made, _ = connection(json.dumps(given), environ={})
        return Path(str(made.ssl_ca_cert)).read_bytes()

    with ThreadPoolExecutor(8) as pool:
        for n in range(40):
            text = f"certificate {n}"
            assert set(pool.map(load, [text] * 8)) == {text.encode()}


def certificate(folder: Path) -> ssl.SSLContext:
    """A self-signed certificate of 127.0.0.1: ``ca.crt``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "emulated")])
    today = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.crt", folder / "key.pem")
    return context


def test_in_a_pod_it_is_the_pods_service_account(tmp_path: Path) -> None:
    account = tmp_path / "serviceaccount"
    account.mkdir()
    with KubernetesCluster(tmp_path / "pods", tls=certificate(account)) as cluster:
        (account / "token").write_text(TOKEN)
        (account / "namespace").write_text("training")
        environ = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(cluster.port),
        }
        made, namespace = connection(environ=environ, service_account=account)
        assert namespace == "training"
        assert Cluster(made, namespace).whoami() == USER
        # The kubelet renews the token; the client reads it again when it is a minute old.
        made.api_key["BearerToken"] = "bearer old"
        assert Cluster(made, namespace).whoami() == USER


def test_an_untrusted_certificate_requires_intervention(tmp_path: Path) -> None:
    with KubernetesCluster(tmp_path / "pods", tls=certificate(tmp_path)) as cluster:
        credential = json.dumps(cluster.kubeconfig())
        executor = KubernetesExecutor(config(credentials={"KUBECONFIG": credential}))
        with pytest.raises(AccountError, match="certificate is not trusted"):
            executor.live()


def test_without_a_credential_the_error_names_the_options(tmp_path: Path) -> None:
    with pytest.raises(AccountError, match="expected a kubeconfig or the path of one"):
        connection(environ={"KUBECONFIG": str(tmp_path / "config")})
    with pytest.raises(AccountError, match="Service token file does not exist"):
        connection(
            environ={"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"},
            service_account=tmp_path,
        )
