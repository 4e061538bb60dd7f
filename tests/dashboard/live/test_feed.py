"""The live stream: delivery, replay, resync, heartbeats, and behaviour without Redis."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dashboard.live import feed, replay
from runs import live_stream
from runs.backends import health
from tests.dashboard.streaming import watch

A, B = str(uuid.uuid4()), str(uuid.uuid4())
NAMES = {"a": A, "b": B}


@pytest.fixture
def redis_url(valkey: str, settings: Any) -> str:
    settings.REDIS_URL = valkey
    live_stream.client().delete(live_stream.STREAM)
    return valkey


class Reader:
    """Reads frames of one stream and skips frames that a test does not check."""

    def __init__(self, *, last: str = "", **topics: str) -> None:
        wanted = {NAMES.get(name, name): after for name, after in topics.items()}
        self._chunks: AsyncIterator[bytes] = feed.events(topics=wanted, last_event_id=last)
        self._frames: list[str] = []

    async def until(self, wanted: str) -> list[str]:
        """Frames up to and including the first that contains ``wanted``."""
        result: list[str] = []
        while True:
            while self._frames:
                result.append(self._frames.pop(0))
                if wanted in result[-1]:
                    return result
            assert sum("event: beat" in frame for frame in result) < 3, f"no {wanted!r}: {result}"
            try:
                chunk = await anext(self._chunks)
            except StopAsyncIteration:
                break
            self._frames += [frame for frame in chunk.decode().split("\n\n") if frame]
        raise AssertionError(f"the stream ended before {wanted!r}: {result}")

    async def close(self) -> None:
        await self._chunks.aclose()  # type: ignore[attr-defined]


def data(frames: list[str], kind: str = "delta") -> list[dict[str, Any]]:
    return [
        json.loads(line.removeprefix("data: "))
        for frame in frames
        if f"event: {kind}\n" in frame
        for line in frame.splitlines()
        if line.startswith("data: ")
    ]


def deltas(frames: list[str]) -> list[dict[str, Any]]:
    return [one["delta"] for one in data(frames)]


def publish(run_id: str, /, **delta: Any) -> None:
    live_stream.publish(run_id, delta)


@pytest.mark.processes
def test_a_run_page_gets_only_deltas_of_its_run(redis_url: str) -> None:
    async def work() -> None:
        reader = Reader(a="")
        await reader.until('"ok":true')
        publish(B, run={"id": B})
        publish(A, run={"id": A}, replicas=[])
        assert deltas(await reader.until("event: delta")) == [{"run": {"id": A}, "replicas": []}]
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_the_list_gets_only_headers_of_all_runs(redis_url: str) -> None:
    async def work() -> None:
        reader = Reader(list="")
        await reader.until('"ok":true')
        publish(A, points=[{"series": "loss"}])
        publish(A, run={"id": A}, points=[{"series": "loss"}])
        publish(B, run={"id": B})
        frames = await reader.until(B)
        assert deltas(frames) == [{"run": {"id": A}}, {"run": {"id": B}}]
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_a_reconnect_replays_missed_messages_once_and_in_order(redis_url: str) -> None:
    publish(A, run={"n": 1})
    cursor = live_stream.latest_id()
    for n in (2, 3):
        publish(A, run={"n": n})
    publish(B, run={"n": 99})

    async def work() -> None:
        reader = Reader(a=cursor)
        frames = await reader.until('{"run":{"n":3}}')
        assert deltas(frames) == [{"run": {"n": 2}}, {"run": {"n": 3}}]
        publish(A, run={"n": 4})
        assert deltas(await reader.until("event: delta")) == [{"run": {"n": 4}}]
        await reader.close()

    watch(work)


@pytest.mark.processes
@pytest.mark.parametrize("resync", [False, True])
def test_a_viewer_without_a_position_gets_one_at_once(redis_url: str, resync: bool) -> None:
    """A browser connects again when a tab opens or closes; it would miss messages in between."""
    publish(B, run={"n": 0})
    newest = live_stream.latest_id()

    async def work() -> None:
        reader = Reader(a="")
        frames = await reader.until('"ok":true')
        if resync:
            frames.clear()
            feed.feed()._broadcast(replay.RESYNC)
        publish(A, run={"n": 1})
        frames += await reader.until("event: delta")
        beats = [frame for frame in frames if "event: beat" in frame]
        assert f"id: {newest}\n" in beats[0] or resync
        position = re.findall(r"id: (\S+)", beats[0])[0]
        await reader.close()
        publish(A, run={"n": 2})
        again = Reader(a=position)
        assert {"run": {"n": 2}} in deltas(await again.until('"n":2'))
        await again.close()

    watch(work)


@pytest.mark.processes
@pytest.mark.parametrize("running", [False, True])
def test_a_reconnect_at_any_position_has_no_gaps_and_no_duplicates(
    redis_url: str, running: bool
) -> None:
    """At every position, with a reader that has just started and with a running one."""
    ids = ["0-0"]
    for n in range(1, 9):
        publish(A if n % 2 else B, run={"n": n})
        ids.append(live_stream.latest_id())

    async def work() -> None:
        other = Reader(list="")
        if running:
            await other.until('"ok":true')
        for place in range(1, 9):
            reader = Reader(a=ids[0], b=ids[0], last=ids[place])
            publish(A, run={"n": -place})
            numbers = [d["run"]["n"] for d in deltas(await reader.until(f'"n":-{place}}}'))]
            assert numbers == [*range(place + 1, 9), *range(-1, -place - 1, -1)]
            await reader.close()
        await other.close()

    watch(work)


@pytest.mark.processes
def test_each_topic_resumes_at_its_own_cursor(redis_url: str) -> None:
    publish(A, run={"n": 0})
    start = live_stream.latest_id()
    for n in (1, 2):
        publish(A, run={"n": n}, points=[])
        publish(B, run={"n": 10 + n}, points=[])
    end = live_stream.latest_id()

    async def work() -> None:
        reader = Reader(a=end, b=start, list=start)
        publish(A, run={"n": 3}, points=[])
        result = await reader.until('"n":3')
        assert [one["delta"] for one in data(result) if one["topic"] == A] == [
            {"run": {"n": 1}},
            {"run": {"n": 2}},
            {"run": {"n": 3}, "points": []},
        ]  # the cursor of the list is older, and it gets headers only
        assert [one["delta"] for one in data(result) if one["topic"] == B] == [
            {"run": {"n": 11}, "points": []},
            {"run": {"n": 12}, "points": []},
        ]
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_a_lost_message_triggers_a_resync_of_its_run(redis_url: str) -> None:
    async def work() -> None:
        readers = [Reader(a=""), Reader(list="")]
        for reader in readers:
            await reader.until('"ok":true')
        assert live_stream.resync(A)
        for reader in readers:
            assert data(await reader.until("event: resync"), "resync")[0]["topic"] == A
            await reader.close()
        assert not live_stream.resync(A), "not again at once"

    live_stream.client().delete(f"archipelago:resynced:{A}")
    watch(work)


@pytest.mark.processes
def test_a_heartbeat_updates_the_cursor(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "HEARTBEAT_S", 0.01)

    async def work() -> None:
        reader = Reader(a="")
        await reader.until('"ok":true')
        publish(B, run={"n": 1})  # of another topic
        await reader.until(f"id: {live_stream.latest_id()}\nevent: beat")
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_the_replay_buffer_is_bounded(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_MESSAGES", 3)
    publish(A, run={"n": 0})
    cursor = live_stream.latest_id()

    async def work() -> None:
        reader = Reader(list="")
        await reader.until('"ok":true')
        for n in range(1, 5):
            publish(A, run={"n": n})
        await reader.until('"n":4')
        late = Reader(a=cursor)
        assert not deltas(await late.until("event: resync"))
        for one in (reader, late):
            await one.close()

    watch(work)


@pytest.mark.processes
def test_a_trimmed_id_triggers_a_resync(redis_url: str) -> None:
    publish(A, run={"n": 1})
    cursor = live_stream.latest_id()
    for n in (2, 3):
        publish(A, run={"n": n})
    live_stream.client().xtrim(live_stream.STREAM, maxlen=1, approximate=False)

    async def work() -> None:
        reader = Reader(a=cursor)
        assert not deltas(await reader.until("event: resync"))
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_a_viewer_of_another_redis_gets_a_resync(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the one before was ahead, so the position of the viewer is after all entries."""
    monkeypatch.setattr(feed, "CHECK_S", 0.0)
    monkeypatch.setattr(feed, "RETRY_S", 0.0)
    publish(A, run={"n": 1})

    async def work() -> None:
        reader = Reader(a="99999999999999-0")
        await reader.until('"ok":true')
        publish(A, run={"n": 2})  # the reader checks after each response
        assert data(await reader.until("event: resync"), "resync") == [{}]
        publish(A, run={"n": 3})
        assert deltas(await reader.until("event: delta")) == [{"run": {"n": 3}}]
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_the_reader_notices_a_stream_that_begins_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "CHECK_S", 0.0)
    monkeypatch.setattr(feed, "BLOCK_MS", 20)
    monkeypatch.setattr(feed, "RETRY_S", 0.0)
    publish(A, run={"n": 1})

    async def work() -> None:
        reader = Reader(a="")
        await reader.until('"ok":true')
        live_stream.client().delete(live_stream.STREAM)
        entry: Any = {"run": A, "data": '{"run":{"n":2}}'}
        live_stream.client().xadd(live_stream.STREAM, entry, id="7-0")
        await reader.until("event: resync")
        live_stream.client().xadd(live_stream.STREAM, entry, id="8-0")
        await reader.until("id: 8-0\nevent: delta")
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_a_slow_viewer_gets_a_resync(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "QUEUE_SIZE", 3)

    async def work() -> None:
        reader = Reader(a="")
        await reader.until('"ok":true')
        for n in range(8):
            publish(A, run={"n": n})
        viewer = next(iter(feed.feed()._all))
        while not viewer.lost:
            await asyncio.sleep(0)
        assert data(await reader.until("event: resync"), "resync") == [{}]
        publish(A, run={"n": 9})
        assert deltas(await reader.until('"n":9'))[-1] == {"run": {"n": 9}}
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_feed_events_report_missing_and_returning_workers(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a worker, no other events come."""
    monkeypatch.setattr(feed, "CHECK_S", 0.0)
    live_stream.client().set(health.HEARTBEAT, 1)

    async def work() -> None:
        reader = Reader(a="")
        (output,) = data(await reader.until('"ok":true'), "feed")
        assert output == {"ok": True, "silent_since": "1970-01-01T00:00:01+00:00"}
        health.beat()
        publish(A, run={"id": A})  # the reader checks after each response
        frames = await reader.until("silent_since")
        assert data(frames, "feed")[-1] == {"ok": True, "silent_since": None}
        late = Reader(b="")
        assert data(await late.until("silent_since"), "feed")[-1]["silent_since"] is None
        live_stream.client().delete(health.HEARTBEAT)
        publish(A, run={"id": A})
        frames = await reader.until("silent_since")
        assert data(frames, "feed")[-1] == {"ok": True, "silent_since": ""}
        for one in (reader, late):
            await one.close()

    watch(work)


def test_feed_events_report_a_redis_outage(settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"

    async def work() -> None:
        reader = Reader(a="5-0")
        frames = await reader.until('"ok":false')
        assert not deltas(frames)
        assert data(frames, "resync") == [{}]  # missed messages cannot be replayed
        await reader.close()

    watch(work)


def test_an_idle_stream_sends_heartbeats(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    monkeypatch.setattr(feed, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(feed, "RETRY_S", 60)

    async def work() -> None:
        reader = Reader(a="")
        await reader.until("event: beat")
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_the_reader_stops_with_the_last_viewer(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "BLOCK_MS", 100)

    async def work() -> None:
        readers = [Reader(a=""), Reader(list="")]
        for reader in readers:
            await reader.until('"ok":true')
        assert sum(t.get_name() == "live-reader" for t in asyncio.all_tasks()) == 1
        for reader in readers:
            await reader.close()
        while any(t.get_name() == "live-reader" for t in asyncio.all_tasks()):
            await asyncio.sleep(0)
        assert not len(feed.feed())
        assert not feed.feed()._viewers

    watch(work)


@pytest.mark.parametrize("text", ["", "x", "5", "5-1", "5-x", "-", "5-1-1"])
def test_valid_stream_ids(text: str) -> None:
    assert replay.is_stream_id(text) == (text in ("5", "5-1"))
