"""Every request body is bounded before anything reads it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dashboard.security import request_bodies
from dashboard.security.request_bodies import BoundedBodies


def answer(
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


def test_a_body_that_announces_too_much_is_not_read() -> None:
    length = str(request_bodies.LIMIT_BYTES + 1).encode()
    assert answer(b"x", headers=((b"content-length", length),)) == (413, 0)


def test_a_body_without_a_length_ends_at_the_limit() -> None:
    chunk = b"x" * 500_000
    status, read = answer(*[chunk] * 100)
    assert status == 413
    assert read <= request_bodies.LIMIT_BYTES


@pytest.mark.parametrize("path", request_bodies.UPLOADS)
def test_paths_that_take_an_archive_take_a_larger_one(path: str) -> None:
    chunk = b"x" * 1_000_000
    assert answer(*[chunk] * 20, path=path) == (200, 20_000_000)
    assert answer(*[chunk] * 30, path=path)[0] == 413


def test_a_small_body_is_passed_on() -> None:
    assert answer(b"name=olga", headers=((b"content-length", b"9"),)) == (200, 9)
