"""A proxy before an S3 server that can be made to fail as buckets do.

One thread per connection; requests and answers pass whole, so it is for small objects. The ``Host``
header passes unchanged: a signature covers it, and the server behind checks signatures.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})
SLOW_S = 1.0
_DENIED = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"""


class Fault(enum.StrEnum):
    """The treatment of a request."""

    NONE = "none"
    HANG = "hang"
    """It is read and never answered."""
    AWAY = "away"
    """Its connection is closed without an answer."""
    READ_ONLY = "read-only"
    """Reject writes with 403 AccessDenied."""
    SLOW = "slow"
    """It is answered a second later."""
    STALE = "stale lists"
    """A LIST is answered as it was when the fault began."""


class BucketProxy:
    """``url`` is what clients use instead of the server's own."""

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target).netloc
        self.fault = Fault.NONE
        self.counts: dict[Fault, int] = dict.fromkeys(Fault, 0)
        self._lists: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}
        self._healed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def set(self, fault: Fault) -> None:
        """Begin a fault, or end one (:data:`Fault.NONE`): requests that hang are then dropped."""
        self.fault = fault
        self._healed.set()
        self._healed = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[BucketProxy]:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            self.set(Fault.NONE)
            self._server.shutdown()
            self._server.server_close()

    def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes] | None:
        """Status, headers and body; None to close the connection."""
        fault = self.fault
        self.counts[fault] += 1
        if fault is Fault.HANG:
            self._healed.wait(600)
            return None
        if fault is Fault.AWAY:
            return None
        if fault is Fault.READ_ONLY and method in ("PUT", "POST", "DELETE"):
            return 403, [("Content-Type", "application/xml")], _DENIED
        if fault is Fault.SLOW:
            time.sleep(SLOW_S)
        listing = method == "GET" and "list-type" in parse_qs(urlsplit(path).query)
        if listing and fault is Fault.STALE and path in self._lists:
            return self._lists[path]
        answer = self._ask(method, path, headers, body)
        if listing and fault is not Fault.STALE:
            self._lists[path] = answer
        return answer

    def _ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.target, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if name.lower() not in HOP_BY_HOP:
                    connection.putheader(name, value)
            if body or method in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            kept = [(k, v) for k, v in response.getheaders() if k.lower() not in HOP_BY_HOP]
            size = response.getheader("Content-Length")
            if method == "HEAD" and size is not None:
                kept.append(("Content-Length", size))
            return response.status, kept, response.read()
        finally:
            connection.close()


def _handler(proxy: BucketProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            body = self._body()
            try:
                found = proxy.answer(self.command, self.path, dict(self.headers.items()), body)
            except (OSError, http.client.HTTPException):
                found = None
            if found is None:
                self.close_connection = True
                return
            status, headers, content = found
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def _body(self) -> bytes:
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                super().handle()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
