"""The HTTP under emulated AWS services: every request is answered by one function."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.emulators.faults import HangUp

Answer = Callable[[str, Mapping[str, str], bytes], tuple[int, str, bytes]]
"""Path, headers with names in lower case, body -> status, content type, body."""


class HttpServer:
    """On 127.0.0.1, on one port all its life; 0 for one that is free."""

    def __init__(self, port: int, answer: Answer) -> None:
        self.port = port
        self._answer = answer
        self._http: _Http | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._http is not None:
            return
        self._http = _Http(self.port, self._answer)
        self.port = self._http.server_port
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections, and end those that are open: clients keep theirs."""
        http, self._http = self._http, None
        if http is None:
            return
        http.shutdown()
        http.server_close()
        http.end_connections()
        assert self._thread is not None
        self._thread.join()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, port: int, answer: Answer) -> None:
        self.answer = answer
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        self.stopped = False
        super().__init__(("127.0.0.1", port), _Handler)

    def end_connections(self) -> None:
        with self.lock:
            self.stopped = True
            for connection in self.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news; anything else is a mistake of ours."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Http

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            if self.server.stopped:
                raise ConnectionAbortedError
            self.server.connections.add(self.connection)

    def finish(self) -> None:
        with self.server.lock:
            self.server.connections.discard(self.connection)
        with contextlib.suppress(ConnectionError):
            super().finish()

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            status, kind, answer = self.server.answer(self.path, headers, body)
        except HangUp:
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass
