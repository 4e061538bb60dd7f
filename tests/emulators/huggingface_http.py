"""The HTTP of the emulated Hub: paths, pages, server-sent events, and its faults over HTTP.

``POST /_emulator/<fault>`` with the fault's arguments as JSON calls that method of
:class:`~tests.emulators.huggingface.HuggingFaceHub`: ``{"job": "run-0-1"}`` to ``preempt``, ``oom``
and ``lose``; ``{"message": ...}`` to ``refuse_quota``; ``{"seconds": 2}`` to ``slow``.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from tests.emulators.huggingface_spec import Refused

if TYPE_CHECKING:
    from tests.emulators.huggingface import HuggingFaceHub

FAULTS = (
    *("preempt", "oom", "lose", "refuse_quota", "slow", "rate_limit", "fail_submit", "schedule"),
    *("restage", "hold_lists"),
)
KEEP_ALIVE_S = 30.0

_JOBS = re.compile(r"/api/jobs/([^/]+)(?:/([^/]+)(?:/(logs|cancel))?)?")


class Server:
    """Serves a hub on 127.0.0.1, on one port all its life; 0 for one that is free at the start."""

    def __init__(self, hub: HuggingFaceHub, port: int) -> None:
        self.hub = hub
        self._http: _HTTP | None = None
        self._thread: threading.Thread | None = None
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        assert self._http is None, "it serves already"
        self._http = _HTTP(self.hub, self.port)
        self.port = self._http.server_port
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        if self._http is None:
            return
        self._http.shutdown()
        self._http.server_close()
        self._http.drop_connections()
        assert self._thread is not None
        self._thread.join()
        self._http = None


def time_text(wall_s: float) -> str | None:
    """As the Hub writes it; None for what has not happened."""
    if not wall_s:
        return None
    at = datetime.fromtimestamp(wall_s, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03}Z"


class _HTTP(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, hub: HuggingFaceHub, port: int) -> None:
        self.hub = hub
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        self.stopped = False
        super().__init__(("127.0.0.1", port), _Handler)

    def drop_connections(self) -> None:
        """Clients keep theirs open, and would be answered on them for ever."""
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
    server: _HTTP
    _drops_answer = False

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

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            told = json.loads(body or b"{}")
        except ValueError:
            told = None
        if isinstance(told, dict):
            self._serve(told)
        else:
            self._answer(400, {"error": "Invalid JSON"})

    def _serve(self, body: dict[str, Any]) -> None:
        url = urlsplit(self.path)
        if url.path.startswith("/_emulator/"):
            self._fault(url.path.removeprefix("/_emulator/"), body)
            return
        hub = self.server.hub
        with self.server.lock:
            hub.requests += 1
        if hub.delay_s:
            time.sleep(hub.delay_s)
        fault = hub.faults.of(f"{self.command} {url.path}")
        if fault == "drop_before":
            self.close_connection = True
            return
        if fault == "unavailable":
            self._answer(503, {"error": "Service Unavailable"})
            return
        self._drops_answer = fault == "drop_after"
        try:
            self._route(url.path, parse_qs(url.query), body)
        except Refused as refused:
            self._refuse(refused)

    def _route(self, path: str, query: Mapping[str, list[str]], body: dict[str, Any]) -> None:
        hub = self.server.hub
        if path == "/api/jobs/hardware" and self.command == "GET":  # public, as on the Hub
            self._answer(200, hub.hardware())
            return
        user = hub.user(self.headers.get("Authorization", ""))
        found = _JOBS.fullmatch(path)
        namespace, job, action = found.groups() if found else ("", None, None)
        match (self.command, job, action):
            case ("GET", None, None) if path == "/api/whoami-v2":
                self._answer(200, hub.whoami(user))
            case _ if not namespace:
                self._answer(404, {"error": "Sorry, we can't find the page you are looking for."})
            case ("GET", None, None):
                self._list(user, namespace, query)
            case ("POST", None, None):
                told = hub.run(user, namespace, body)
                if told is None:
                    self.close_connection = True
                    return
                self._answer(200, told)
            case ("GET", str(), None):
                self._answer(200, hub.inspect(user, namespace, job))
            case ("POST", str(), "cancel"):
                self._answer(200, hub.cancel(user, namespace, job))
            case ("GET", str(), "logs"):
                hub.check_logs(user, namespace, job)
                self._logs(job, tail=int(query.get("tail", ["0"])[0]))
            case _:
                self._answer(405, {"error": "Method not allowed"})

    def _list(self, user: str, namespace: str, query: Mapping[str, list[str]]) -> None:
        page, cursor = self.server.hub.list(
            user,
            namespace,
            stages=query.get("stage", []),
            labels=query.get("label", []),
            after=query.get("cursor", [""])[0],
        )
        headers = {}
        if cursor:
            asked = [(name, v) for name, vs in query.items() if name != "cursor" for v in vs]
            more = urlencode([*asked, ("cursor", cursor)])
            base = f"http://127.0.0.1:{self.server.server_port}/api/jobs/{quote(namespace)}"
            headers["Link"] = f'<{base}?{more}>; rel="next"'
        self._answer(200, page, headers)

    def _logs(self, job_id: str, *, tail: int) -> None:
        """Everything so far and what is added until the job ends, as the Hub does: it closes the
        stream of a job that has ended, and keeps any other open."""
        processes = self.server.hub.processes
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        after, announced = 0, False
        while not self.server.stopped:
            try:
                job = processes.get(job_id)
                lines = processes.log_lines(job_id, after)
            except KeyError:  # lost meanwhile
                break
            if job.started_wall_s and not announced:
                announced = True
                at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(job.started_wall_s))
                self._event(job.started_wall_s, f"===== Job started at {at} =====")
                lines = lines[-tail:] if tail else lines
            for number, wall_s, text in lines:
                after = number
                self._event(wall_s, text)
            if job.state == "ended":
                break
            try:
                changed = processes.wait_change(job_id, KEEP_ALIVE_S, after=job.changes)
            except KeyError:
                break
            if changed.changes == job.changes:
                self._chunk(b": keep-alive\n\n")
        self._chunk(b"")

    def _event(self, wall_s: float, text: str) -> None:
        told = json.dumps({"data": text, "timestamp": time_text(wall_s)})
        self._chunk(f"data: {told}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _refuse(self, refused: Refused) -> None:
        self._answer(refused.status, {"error": str(refused)}, refused.headers)

    def _fault(self, name: str, arguments: dict[str, Any]) -> None:
        if name not in FAULTS:
            self._answer(404, {"error": f"expected a fault of {', '.join(FAULTS)}, found {name!r}"})
            return
        try:
            getattr(self.server.hub, name)(**arguments)
        except (KeyError, TypeError) as error:
            self._answer(400, {"error": str(cast(object, error.args[0]))})
        else:
            self._answer(200, {})

    def _answer(self, status: int, told: object, headers: Mapping[str, str] | None = None) -> None:
        if self._drops_answer:
            self.close_connection = True
            return
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for header, value in (headers or {}).items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)
