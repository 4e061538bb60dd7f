"""A size limit on every request body, enforced before anything reads it.

Django receives a whole body, on disk if it is large, before authentication, and its own limits only
apply to what it parses. Here a longer body ends the request with 413 as soon as its length is
announced or exceeded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from runs.submit.uploads import ARCHIVE_BYTES

Application = Callable[[Any, Any, Any], Awaitable[None]]

LIMIT_BYTES = 2_500_000
UPLOAD_BYTES = ARCHIVE_BYTES + LIMIT_BYTES
UPLOADS = ("/api/archives", "/runs/new", "/runs/test.json", "/runs/estimate.json")
"""Paths that accept a zip of code."""


class BodyTooLarge(Exception):
    """The body exceeds the limit."""


class BoundedBodies:
    """ASGI middleware that rejects bodies over the limit of their path."""

    def __init__(self, application: Application) -> None:
        self.application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.application(scope, receive, send)
            return
        limit = UPLOAD_BYTES if scope["path"].endswith(UPLOADS) else LIMIT_BYTES
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or len(announced) > 18 or int(announced) > limit:
            await _refuse(send, limit)
            return
        received = 0
        started = False

        async def bounded_receive() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise BodyTooLarge
            return message

        async def watched_send(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.application(scope, bounded_receive, watched_send)
        except BodyTooLarge:
            if not started:
                await _refuse(send, limit)


async def _refuse(send: Any, limit: int) -> None:
    body = f"The request is too large: expected at most {limit:,} bytes.".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": body})
