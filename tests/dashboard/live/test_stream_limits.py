"""How many live streams one user and one session can have."""

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
def test_more_streams_than_a_session_can_have_are_refused(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    monkeypatch.setattr(feed, "PER_SESSION", 2)
    client, other = AsyncClient(), AsyncClient()
    user = seed.user("olga", "operator")
    client.force_login(user)
    other.force_login(user)

    async def begun(by: AsyncClient) -> Any:
        answer = await by.get("/stream")
        if answer.status_code == 200:
            frames = aiter(answer.streaming_content)
            assert b"retry" in await anext(frames)
            return frames
        assert answer["Retry-After"]
        assert b"expected fewer live streams" in answer.content
        return answer.status_code

    async def left(streams: int) -> None:
        """The stream is closed with the response's own iterator, which the collector ends here.
        A server cancels it while it waits."""
        while feed.feed().open[f"user {user.pk}"] > streams:
            gc.collect()
            await asyncio.sleep(0.01)

    async def work() -> None:
        first, second = await begun(client), await begun(client)
        assert await begun(client) == 429
        third = await begun(other)  # another browser of the same user
        monkeypatch.setattr(feed, "PER_USER", 3)
        assert await begun(other) == 429
        await first.aclose()
        await left(2)
        fourth = await begun(client)
        for frames in (second, third, fourth):
            await frames.aclose()
        await left(0)
        assert feed.feed().open == {}

    watch(work)
