"""Every request body is limited before anything reads it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dashboard.security import request_bodies
from dashboard.security.request_bodies import BoundedBodies


def response(
    *chunks: bytes, path: str = "/login", headers: tuple[tuple[bytes, bytes], ...] = ()
) -> tuple[int, int]:
    """(status, bytes that the application has read)"""
    read = 0
    messages: list[dict[str, Any]] = []
    waiting = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    waiting.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        messages.append(message)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal read
        while True:
            message = await receive()
            read += len(message["body"])
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    scope = {"type": "http", "path": path, "headers": list(headers)}
    asyncio.run(BoundedBodies(application)(scope, receive, send))
    return messages[0]["status"], read


def test_a_too_long_announced_body_is_not_read() -> None:
    length = str(request_bodies.LIMIT_BYTES + 1).encode()
    assert response(b"x", headers=((b"content-length", length),)) == (413, 0)


def test_a_chunked_body_is_cut_off_at_the_limit() -> None:
    chunk = b"x" * 500_000
    status, read = response(*[chunk] * 100)
    assert status == 413
    assert read <= request_bodies.LIMIT_BYTES


@pytest.mark.parametrize("path", request_bodies.UPLOADS)
def test_upload_paths_have_a_higher_limit(path: str) -> None:
    chunk = b"x" * 1_000_000
    assert response(*[chunk] * 20, path=path) == (200, 20_000_000)
    assert response(*[chunk] * 30, path=path)[0] == 413


def test_a_small_body_is_passed_on() -> None:
    assert response(b"name=olga", headers=((b"content-length", b"9"),)) == (200, 9)
