"""Responses of a service map to the same errors with every client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from diloco.store import fsspec, s3
from diloco.store.base import MissingKey, Store, StoreDenied, StoreUnavailable
from diloco.store.fsspec import FsspecStore
from diloco.store.s3 import ObstoreStore
from tests.matrix import slow_except
from tests.servers import free_ports

ERROR = "<Error><Code>{}</Code><Message>injected</Message></Error>"


class FakeService(ThreadingHTTPServer):
    """Sends one status and body for every request; ``None`` closes the connection."""

    daemon_threads = True
    response: tuple[int, str] | None = (200, "")
    requests = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    server: FakeService

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _any(self) -> None:
        self.server.requests += 1
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.response is None:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        status, text = self.server.response
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any


@pytest.fixture
def service() -> Iterator[FakeService]:
    with FakeService(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def point_clients_to(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Configure all clients with ``url``, with credentials, and with few retries."""
    azure = f"DefaultEndpointsProtocol=http;AccountName=a;AccountKey=eA==;BlobEndpoint={url}/a;"
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_MAX_ATTEMPTS": "1",
        "STORAGE_EMULATOR_HOST": url,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "AZURE_STORAGE_CONNECTION_STRING": azure,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3, "RETRIES", 0)
    monkeypatch.setattr(fsspec, "AZURE_RETRIES", 0)
    monkeypatch.setattr("gcsfs.retry.min", lambda *pauses: 0, raising=False)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)


CLIENTS: dict[str, Callable[[], Store]] = {
    "obstore": lambda: ObstoreStore("s3://bucket/run"),
    "s3fs": lambda: FsspecStore("s3://bucket/run"),
    "gs": lambda: FsspecStore("gs://bucket/run"),
    "az": lambda: FsspecStore("az://bucket/run"),
}


@pytest.fixture(params=slow_except(("obstore", "gs"), CLIENTS))
def client(request: pytest.FixtureRequest) -> Callable[[], Store]:
    return CLIENTS[request.param]


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "InternalError"), (503, "SlowDown"), (503, "ServerBusy"), (429, "SlowDown")],
)
def test_busy_or_broken_service_is_unavailable(
    service: FakeService,
    client: Callable[[], Store],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
) -> None:
    point_clients_to(monkeypatch, f"http://127.0.0.1:{service.server_address[1]}")
    service.response = (status, ERROR.format(code))
    store = client()
    for call in (lambda: store.get("a"), lambda: store.put("a", b"")):
        with pytest.raises(StoreUnavailable):
            call()
    with pytest.raises(StoreUnavailable):
        store.create("a", b"")


def test_clock_skew_is_unavailable(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 responds with 403 until the clock of this machine is set."""
    point_clients_to(monkeypatch, f"http://127.0.0.1:{service.server_address[1]}")
    service.response = (403, ERROR.format("RequestTimeTooSkewed"))
    with pytest.raises(StoreUnavailable, match="RequestTimeTooSkewed"):
        ObstoreStore("s3://bucket/run").list("")


def test_closed_connection_is_unavailable(
    service: FakeService, client: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    point_clients_to(monkeypatch, f"http://127.0.0.1:{service.server_address[1]}")
    service.response = None
    with pytest.raises(StoreUnavailable):
        client().get("a")


def test_timeout_of_a_small_object_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as silent:  # accepts connections, and never responds
        point_clients_to(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(s3, "RECORD_TIMEOUT_S", 0.2)
        store = ObstoreStore("s3://bucket/run")
        for call in (lambda: store.put("a", b"beat"), lambda: store.list("")):
            with pytest.raises(StoreUnavailable):
                call()


def test_refused_connection_is_unavailable(
    client: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    point_clients_to(monkeypatch, f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(StoreUnavailable):
        client().get("a")


def test_refusal_is_denied_and_not_retried(
    service: FakeService, client: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    point_clients_to(monkeypatch, f"http://127.0.0.1:{service.server_address[1]}")
    service.response = (403, ERROR.format("AccessDenied"))
    with pytest.raises(StoreDenied):
        client().put("a", b"")
    assert service.requests == 1


def test_404_is_a_missing_key(
    service: FakeService, client: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    point_clients_to(monkeypatch, f"http://127.0.0.1:{service.server_address[1]}")
    service.response = (404, ERROR.format("NoSuchKey"))
    with pytest.raises(MissingKey):
        client().get("a")
