"""The HTTP server of all emulated backends (Modal speaks gRPC).

An emulator is an *application*: a function that answers one :class:`Exchange`. The server runs on
127.0.0.1 and keeps its port when it is stopped and started again. Stopping it also closes open
connections, which clients would otherwise keep using.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

from tests.emulators.faults import HangUp

FAULT_PREFIX = "/_emulator/"
Application = Callable[["Exchange"], None]


class HttpServer:
    """Serves ``application`` on 127.0.0.1. Port 0 selects a free port at the first start."""

    def __init__(
        self,
        application: Application,
        *,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        idle_s: float | None = None,
    ) -> None:
        self.port = port
        self.closing = threading.Event()
        self._application = application
        self._tls = tls
        self._idle_s = idle_s
        self._listener: _Listener | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Accept connections. Does nothing on a running server."""
        if self._listener is None:
            self.closing = threading.Event()
            self._listener = _Listener(self.port, self._application, self.closing, self._idle_s)
            self.port = self._listener.server_port
            if self._tls is not None:
                self._listener.socket = self._tls.wrap_socket(
                    self._listener.socket, server_side=True
                )
            self._thread = threading.Thread(
                target=self._listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
            )
            self._thread.start()
        return self

    def stop(self) -> None:
        """Refuse new connections and close open ones. Does nothing on a stopped server."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        listener.shutdown()
        listener.server_close()
        listener.close_connections()
        assert self._thread is not None
        self._thread.join()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, port: int, application: Application, closing: threading.Event, idle_s: float | None
    ) -> None:
        self.application = application
        self.closing = closing
        self.idle_s = idle_s
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), Exchange)

    def close_connections(self) -> None:
        with self.lock:
            self.closing.set()
            for connection in self.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections; print other errors, which are defects of an emulator."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError | ssl.SSLError):
            super().handle_error(request, client_address)


class Exchange(BaseHTTPRequestHandler):
    """One request and its response. ``closing`` is set when the server stops."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Listener
    address: SplitResult
    body: bytes
    drops_answer = False
    """Close the connection instead of sending the response."""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.idle_s)
        with self.server.lock:
            if self.server.closing.is_set():
                raise ConnectionAbortedError
            self.server.connections.add(self.connection)

    def finish(self) -> None:
        with self.server.lock:
            self.server.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.address = urlsplit(self.path)
        self.drops_answer = False
        try:
            self.server.application(self)
        except HangUp:
            self._hang_up()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    @property
    def closing(self) -> threading.Event:
        return self.server.closing

    @property
    def fault(self) -> str | None:
        """The fault that the request injects (``POST /_emulator/<fault>``); None for others."""
        path = self.address.path
        return path.removeprefix(FAULT_PREFIX) if path.startswith(FAULT_PREFIX) else None

    def answer(
        self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        if self.drops_answer:
            self._hang_up()
            return
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def answer_json(
        self, status: int, value: object, headers: Mapping[str, str] | None = None
    ) -> None:
        self.answer(status, json.dumps(value).encode(), "application/json", headers)

    def stream(self, kind: str, chunks: Iterable[bytes]) -> None:
        """Send a chunked response, each chunk as soon as it exists."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        for chunk in chunks:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def _hang_up(self) -> None:
        """Close the connection without a response."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def inject(target: object, faults: tuple[str, ...], name: str, arguments: object) -> None:
    """Call the method of ``target`` for a fault. Raises :class:`ValueError`."""
    if name not in faults:
        raise ValueError(f"expected a fault of {', '.join(faults)}, found {name!r}")
    if not isinstance(arguments, dict):
        raise ValueError(f"expected a JSON object of arguments, found {arguments!r}")
    try:
        getattr(target, name)(**arguments)
    except (KeyError, TypeError) as error:
        raise ValueError(str(error.args[0])) from error
