"""Limits of live streams per user and per session."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from django.test import AsyncClient

from dashboard.live import feed
from tests.browser import seed
from tests.dashboard.streaming import watch


@pytest.mark.django_db(transaction=True)
def test_streams_per_session_are_limited(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    monkeypatch.setattr(feed, "PER_SESSION", 2)
    client, other = AsyncClient(), AsyncClient()
    user = seed.user("olga", "operator")
    client.force_login(user)
    other.force_login(user)

    async def started(by: AsyncClient) -> Any:
        response = await by.get("/stream")
        if response.status_code == 200:
            frames = aiter(response.streaming_content)
            assert b"retry" in await anext(frames)
            return frames
        assert response["Retry-After"]
        assert b"expected fewer live streams" in response.content
        return response.status_code

    async def left(streams: int) -> None:
        """Close the stream with the response's iterator, which garbage collection ends here. A
        server cancels it while it waits."""
        while feed.feed().open[f"user {user.pk}"] > streams:
            gc.collect()
            await asyncio.sleep(0.01)

    async def work() -> None:
        first, second = await started(client), await started(client)
        assert await started(client) == 429
        third = await started(other)  # another browser of the same user
        monkeypatch.setattr(feed, "PER_USER", 3)
        assert await started(other) == 429
        await first.aclose()
        await left(2)
        fourth = await started(client)
        for frames in (second, third, fourth):
            await frames.aclose()
        await left(0)
        assert feed.feed().open == {}

    watch(work)
