"""The live stream: what a viewer is sent, what it is not, and what happens without Redis."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from django.test import AsyncClient, Client

from dashboard import stream
from runs import live
from tests.browser import seed
from tests.dashboard.people import KINDS, client_for

A, B = str(uuid.uuid4()), str(uuid.uuid4())
TIMEOUT_S = 20


@pytest.fixture
def redis_url(valkey: str, settings: Any) -> str:
    settings.REDIS_URL = valkey
    live.client().delete(live.STREAM)
    return valkey


def watch(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), TIMEOUT_S))


class Reader:
    """Reads frames of one stream, skipping what a test does not ask about."""

    def __init__(self, *, run: str | None, after: str = "") -> None:
        self._frames: AsyncIterator[str] = stream.events(run=run, after=after)

    async def until(self, wanted: str) -> list[str]:
        """Frames up to and with the first that contains ``wanted``."""
        found: list[str] = []
        async for frame in self._frames:
            found.append(frame)
            if wanted in frame:
                return found
        raise AssertionError(f"the stream ended before {wanted!r}: {found}")

    async def close(self) -> None:
        await self._frames.aclose()  # type: ignore[attr-defined]


def deltas(frames: list[str]) -> list[dict[str, Any]]:
    return [
        json.loads(line.removeprefix("data: "))
        for frame in frames
        if "event: delta" in frame
        for line in frame.splitlines()
        if line.startswith("data: ")
    ]


def publish(run_id: str, /, **delta: Any) -> None:
    live.publish(run_id, delta)


@pytest.mark.processes
def test_a_page_gets_the_deltas_of_its_run_alone(redis_url: str) -> None:
    async def work() -> None:
        reader = Reader(run=A)
        await reader.until('"ok":true')
        publish(B, run={"id": B})
        publish(A, run={"id": A}, replicas=[])
        assert deltas(await reader.until("delta")) == [{"run": {"id": A}, "replicas": []}]
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_the_list_gets_headers_of_all_runs_and_nothing_else(redis_url: str) -> None:
    async def work() -> None:
        reader = Reader(run=None)
        await reader.until('"ok":true')
        publish(A, points=[{"series": "loss"}])
        publish(A, run={"id": A}, points=[{"series": "loss"}])
        publish(B, run={"id": B})
        frames = await reader.until(B)
        assert deltas(frames) == [{"run": {"id": A}}, {"run": {"id": B}}]
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_a_reconnect_is_sent_what_it_missed_once_and_in_order(redis_url: str) -> None:
    publish(A, run={"n": 1})
    cursor = live.latest_id()
    for n in (2, 3):
        publish(A, run={"n": n})
    publish(B, run={"n": 99})

    async def work() -> None:
        reader = Reader(run=A, after=cursor)
        await reader.until('{"run":{"n":3}}')
        publish(A, run={"n": 4})
        assert deltas(await reader.until("delta")) == [{"run": {"n": 4}}]
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_an_id_that_has_been_trimmed_away_means_resync(redis_url: str) -> None:
    publish(A, run={"n": 1})
    cursor = live.latest_id()
    for n in (2, 3):
        publish(A, run={"n": n})
    live.client().xtrim(live.STREAM, maxlen=1, approximate=False)

    async def work() -> None:
        reader = Reader(run=A, after=cursor)
        assert not deltas(await reader.until("event: resync"))
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_a_slow_viewer_is_told_to_start_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "QUEUE_SIZE", 3)

    async def work() -> None:
        reader = Reader(run=A)
        await reader.until('"ok":true')
        for n in range(8):
            publish(A, run={"n": n})
        viewer = next(iter(stream.feed()._viewers))
        while not viewer.lost:
            await asyncio.sleep(0)
        assert (await reader.until("event: resync"))[-1] == stream.RESYNC
        publish(A, run={"n": 9})
        assert deltas(await reader.until('"n":9'))[-1] == {"run": {"n": 9}}
        await reader.close()

    watch(work)


def test_without_redis_the_page_is_told_so(settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"

    async def work() -> None:
        reader = Reader(run=A, after="5-0")
        frames = await reader.until('"ok":false')
        assert not deltas(frames)
        assert stream.RESYNC in frames  # what was missed cannot be told
        await reader.close()

    watch(work)


def test_an_idle_stream_has_a_heart_beat(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(stream, "RETRY_S", 60)

    async def work() -> None:
        reader = Reader(run=A)
        await reader.until(": beat")
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_the_reader_ends_with_the_last_viewer(redis_url: str) -> None:
    async def work() -> None:
        readers = [Reader(run=A), Reader(run=None)]
        for reader in readers:
            await reader.until('"ok":true')
        assert sum(t.get_name() == "live-reader" for t in asyncio.all_tasks()) == 1
        for reader in readers:
            await reader.close()
        while any(t.get_name() == "live-reader" for t in asyncio.all_tasks()):
            await asyncio.sleep(0)
        assert not stream.feed()._viewers

    watch(work)


@pytest.mark.parametrize("text", ["", "x", "5", "5-1", "5-x", "-", "5-1-1"])
def test_what_is_an_id(text: str) -> None:
    assert stream.is_stream_id(text) == (text in ("5", "5-1"))


@pytest.mark.django_db
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["list", "run"])
def test_who_may_watch(which: str, kind: str) -> None:
    run = seed.run(seed.user("owner", "operator"), committed=0)
    url = f"/runs/{run.pk}/stream" if which == "run" else "/stream"
    answer = client_for(kind, run.owner).get(url)
    assert answer.status_code == (401 if kind == "anonymous" else 200)
    if kind != "anonymous":
        assert answer["Content-Type"] == "text/event-stream"
        assert answer["Cache-Control"] == "no-store"


@pytest.mark.django_db
def test_a_run_that_is_not_there(client: Client) -> None:
    client.force_login(seed.user("olga", "operator"))
    assert client.get(f"/runs/{uuid.uuid4()}/stream").status_code == 404


@pytest.mark.django_db(transaction=True)
def test_no_database_connection_is_held_while_streaming(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dashboard.views import live as views

    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    closed: list[bool] = []
    monkeypatch.setattr(views.connections, "close_all", lambda: closed.append(True))
    client = AsyncClient()
    client.force_login(seed.user("olga", "operator"))

    async def work() -> None:
        answer = await client.get("/stream")
        assert closed == [True]
        frames = aiter(answer.streaming_content)
        assert b"retry" in await anext(frames)
        await frames.aclose()

    watch(work)
