"""The HTTP API of the emulated Hub: paths, pages, server-sent events, and faults.

``POST /_emulator/<fault>`` with the fault's arguments as JSON calls that method of
:class:`~tests.emulators.huggingface.HuggingFaceHub`: ``{"job": "run-0-1"}`` to ``preempt``, ``oom``
and ``lose``; ``{"message": ...}`` to ``refuse_quota``; ``{"seconds": 2}`` to ``slow``.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, urlencode

from tests.emulators.faults import HangUp
from tests.emulators.http_server import Exchange, inject
from tests.emulators.huggingface_spec import Refused

if TYPE_CHECKING:
    from tests.emulators.huggingface import HuggingFaceHub

FAULTS = (
    *("preempt", "oom", "lose", "refuse_quota", "slow", "rate_limit", "fail_submit", "schedule"),
    *("restage", "hold_lists"),
)
KEEP_ALIVE_S = 30.0

_JOBS = re.compile(r"/api/jobs/([^/]+)(?:/([^/]+)(?:/(logs|cancel))?)?")


def time_text(wall_s: float) -> str | None:
    """A time in the Hub's format; None for 0."""
    if not wall_s:
        return None
    at = datetime.fromtimestamp(wall_s, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03}Z"


class HubApi:
    """Answers requests for a hub."""

    def __init__(self, hub: HuggingFaceHub) -> None:
        self.hub = hub
        self._lock = threading.Lock()

    def __call__(self, exchange: Exchange) -> None:
        try:
            body = json.loads(exchange.body or b"{}")
        except ValueError:
            body = None
        if not isinstance(body, dict):
            exchange.answer_json(400, {"error": "Invalid JSON"})
        elif exchange.fault is not None:
            self._fault(exchange, exchange.fault, body)
        else:
            self._serve(exchange, body)

    def _serve(self, exchange: Exchange, body: dict[str, Any]) -> None:
        with self._lock:
            self.hub.requests += 1
        if self.hub.delay_s:
            time.sleep(self.hub.delay_s)
        fault = self.hub.faults.of(f"{exchange.command} {exchange.address.path}")
        if fault == "drop_before":
            raise HangUp
        if fault == "unavailable":
            exchange.answer_json(503, {"error": "Service Unavailable"})
            return
        exchange.drops_answer = fault == "drop_after"
        try:
            self._route(exchange, parse_qs(exchange.address.query), body)
        except Refused as refused:
            exchange.answer_json(refused.status, {"error": str(refused)}, refused.headers)

    def _route(
        self, exchange: Exchange, query: Mapping[str, list[str]], body: dict[str, Any]
    ) -> None:
        hub, path, answer = self.hub, exchange.address.path, exchange.answer_json
        if path == "/api/jobs/hardware" and exchange.command == "GET":  # public, as on the Hub
            answer(200, hub.hardware())
            return
        user = hub.user(exchange.headers.get("Authorization", ""))
        match = _JOBS.fullmatch(path)
        namespace, job, action = match.groups() if match else ("", None, None)
        match (exchange.command, job, action):
            case ("GET", None, None) if path == "/api/whoami-v2":
                answer(200, hub.whoami(user))
            case _ if not namespace:
                answer(404, {"error": "Sorry, we can't find the page you are looking for."})
            case ("GET", None, None):
                self._list(exchange, user, namespace, query)
            case ("POST", None, None):
                created = hub.run(user, namespace, body)
                if created is None:
                    raise HangUp
                answer(200, created)
            case ("GET", str(), None):
                answer(200, hub.inspect(user, namespace, job))
            case ("POST", str(), "cancel"):
                answer(200, hub.cancel(user, namespace, job))
            case ("GET", str(), "logs"):
                hub.check_logs(user, namespace, job)
                chunks = self._logs(job, tail=int(query.get("tail", ["0"])[0]), exchange=exchange)
                exchange.stream("text/event-stream", chunks)
            case _:
                answer(405, {"error": "Method not allowed"})

    def _list(
        self, exchange: Exchange, user: str, namespace: str, query: Mapping[str, list[str]]
    ) -> None:
        page, cursor = self.hub.list(
            user,
            namespace,
            stages=query.get("stage", []),
            labels=query.get("label", []),
            after=query.get("cursor", [""])[0],
        )
        headers = {}
        if cursor:
            filters = [(name, v) for name, vs in query.items() if name != "cursor" for v in vs]
            more = urlencode([*filters, ("cursor", cursor)])
            headers["Link"] = f'<{self.hub.url}/api/jobs/{quote(namespace)}?{more}>; rel="next"'
        exchange.answer_json(200, page, headers)

    def _logs(self, job_id: str, *, tail: int, exchange: Exchange) -> Iterator[bytes]:
        """All lines, until the job ends. Like the Hub, the stream of a running job stays open."""
        processes = self.hub.processes
        after, announced = 0, False
        while not exchange.closing.is_set():
            try:
                job = processes.get(job_id)
                lines = processes.log_lines(job_id, after)
            except KeyError:  # lost in the meantime
                return
            if job.started_wall_s and not announced:
                announced = True
                at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(job.started_wall_s))
                yield _event(job.started_wall_s, f"===== Job started at {at} =====")
                lines = lines[-tail:] if tail else lines
            for number, wall_s, text in lines:
                after = number
                yield _event(wall_s, text)
            if job.state == "ended":
                return
            try:
                changed = processes.wait_change(job_id, KEEP_ALIVE_S, after=job.changes)
            except KeyError:
                return
            if changed.changes == job.changes:
                yield b": keep-alive\n\n"

    def _fault(self, exchange: Exchange, name: str, arguments: dict[str, Any]) -> None:
        try:
            inject(self.hub, FAULTS, name, arguments)
        except ValueError as error:
            exchange.answer_json(404 if name not in FAULTS else 400, {"error": str(error)})
        else:
            exchange.answer_json(200, {})


def _event(wall_s: float, text: str) -> bytes:
    event = json.dumps({"data": text, "timestamp": time_text(wall_s)})
    return f"data: {event}\n\n".encode()
