"""What a service says decides whether trying again can help, whichever client hears it."""

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
from tests.servers import free_ports

ERROR = "<Error><Code>{}</Code><Message>so it is</Message></Error>"


class Answering(ThreadingHTTPServer):
    """Answers every request with one status and body; ``None`` hangs up instead."""

    daemon_threads = True
    answer: tuple[int, str] | None = (200, "")
    requests = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    server: Answering

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _any(self) -> None:
        self.server.requests += 1
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.answer is None:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        status, text = self.server.answer
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any


@pytest.fixture
def service() -> Iterator[Answering]:
    with Answering(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def lead_to(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Every client asks at ``url``, with credentials, and does not try again for long."""
    for name, value in {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_MAX_ATTEMPTS": "1", "STORAGE_EMULATOR_HOST": url,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=http;AccountName=a;"
        f"AccountKey=eA==;BlobEndpoint={url}/a;",
    }.items():  # fmt: skip
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


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Callable[[], Store]:
    return CLIENTS[request.param]


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "InternalError"), (503, "SlowDown"), (503, "ServerBusy"), (429, "SlowDown")],
)
def test_a_busy_or_broken_service_is_unavailable(
    service: Answering,
    client: Callable[[], Store],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
) -> None:
    lead_to(monkeypatch, f"http://127.0.0.1:{service.server_address[1]}")
    service.answer = (status, ERROR.format(code))
    store = client()
    for call in (lambda: store.get("a"), lambda: store.put("a", b"")):
        with pytest.raises(StoreUnavailable):
            call()
    with pytest.raises(StoreUnavailable):
        store.create("a", b"")


def test_a_request_with_the_time_of_a_wrong_clock_is_tried_again(
    service: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 answers 403 until the clock of this machine is set."""
    lead_to(monkeypatch, f"http://127.0.0.1:{service.server_address[1]}")
    service.answer = (403, ERROR.format("RequestTimeTooSkewed"))
    with pytest.raises(StoreUnavailable, match="RequestTimeTooSkewed"):
        ObstoreStore("s3://bucket/run").list("")


def test_a_service_that_hangs_up_is_unavailable(
    service: Answering, client: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_to(monkeypatch, f"http://127.0.0.1:{service.server_address[1]}")
    service.answer = None
    with pytest.raises(StoreUnavailable):
        client().get("a")


def test_a_service_that_says_nothing_is_unavailable_in_the_time_a_beat_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        lead_to(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(s3, "RECORD_TIMEOUT_S", 0.2)
        store = ObstoreStore("s3://bucket/run")
        for call in (lambda: store.put("a", b"beat"), lambda: store.list("")):
            with pytest.raises(StoreUnavailable):
                call()


def test_where_nobody_listens_is_unavailable(
    client: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_to(monkeypatch, f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(StoreUnavailable):
        client().get("a")


def test_a_refusal_is_denied_and_asked_once(
    service: Answering, client: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_to(monkeypatch, f"http://127.0.0.1:{service.server_address[1]}")
    service.answer = (403, ERROR.format("AccessDenied"))
    with pytest.raises(StoreDenied):
        client().put("a", b"")
    assert service.requests == 1


def test_what_is_not_there_is_missing(
    service: Answering, client: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_to(monkeypatch, f"http://127.0.0.1:{service.server_address[1]}")
    service.answer = (404, ERROR.format("NoSuchKey"))
    with pytest.raises(MissingKey):
        client().get("a")
