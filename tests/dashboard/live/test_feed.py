"""The live stream: what a viewer is sent, what it is not, and what happens without Redis."""

from __future__ import annotations

import asyncio
import json
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
    """Reads frames of one stream, skipping what a test does not ask about."""

    def __init__(self, *, last: str = "", **topics: str) -> None:
        wanted = {NAMES.get(name, name): after for name, after in topics.items()}
        self._chunks: AsyncIterator[bytes] = feed.events(topics=wanted, last_event_id=last)
        self._frames: list[str] = []

    async def until(self, wanted: str) -> list[str]:
        """Frames up to and with the first that contains ``wanted``."""
        found: list[str] = []
        while True:
            while self._frames:
                found.append(self._frames.pop(0))
                if wanted in found[-1]:
                    return found
            assert sum("event: beat" in frame for frame in found) < 3, f"no {wanted!r}: {found}"
            try:
                chunk = await anext(self._chunks)
            except StopAsyncIteration:
                break
            self._frames += [frame for frame in chunk.decode().split("\n\n") if frame]
        raise AssertionError(f"the stream ended before {wanted!r}: {found}")

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
def test_a_page_gets_the_deltas_of_its_run_alone(redis_url: str) -> None:
    async def work() -> None:
        reader = Reader(a="")
        await reader.until('"ok":true')
        publish(B, run={"id": B})
        publish(A, run={"id": A}, replicas=[])
        assert deltas(await reader.until("event: delta")) == [{"run": {"id": A}, "replicas": []}]
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_the_list_gets_headers_of_all_runs_and_nothing_else(redis_url: str) -> None:
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
def test_a_reconnect_is_sent_what_it_missed_once_and_in_order(redis_url: str) -> None:
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
@pytest.mark.parametrize("running", [False, True])
def test_wherever_a_browser_comes_back_it_loses_nothing_and_has_nothing_twice(
    redis_url: str, running: bool
) -> None:
    """At every place, in a process that has just started and in one that others watch."""
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
def test_each_topic_is_taken_up_where_its_page_is(redis_url: str) -> None:
    publish(A, run={"n": 0})
    start = live_stream.latest_id()
    for n in (1, 2):
        publish(A, run={"n": n}, points=[])
        publish(B, run={"n": 10 + n}, points=[])
    end = live_stream.latest_id()

    async def work() -> None:
        reader = Reader(a=end, b=start, list=start)
        publish(A, run={"n": 3}, points=[])
        found = await reader.until('"n":3')
        assert [one["delta"] for one in data(found) if one["topic"] == A] == [
            {"run": {"n": 1}},
            {"run": {"n": 2}},
            {"run": {"n": 3}, "points": []},
        ]  # fmt: skip -- the list is behind, and wants headers only
        assert [one["delta"] for one in data(found) if one["topic"] == B] == [
            {"run": {"n": 11}, "points": []}, {"run": {"n": 12}, "points": []},
        ]  # fmt: skip
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_what_a_worker_could_not_tell_is_told_by_name(redis_url: str) -> None:
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
def test_a_beat_brings_the_place_up_to_date(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "HEARTBEAT_S", 0.01)

    async def work() -> None:
        reader = Reader(a="")
        await reader.until('"ok":true')
        publish(B, run={"n": 1})  # not for it
        await reader.until(f"id: {live_stream.latest_id()}\nevent: beat")
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_only_so_much_is_kept_for_those_who_come_back(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "KEPT", 3)
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
def test_an_id_that_has_been_trimmed_away_means_resync(redis_url: str) -> None:
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
def test_a_slow_viewer_is_told_to_start_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_pages_are_told_when_no_worker_is_at_work_and_when_one_is_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would come then."""
    monkeypatch.setattr(feed, "LOOK_S", 0.0)
    live_stream.client().set(health.HEARTBEAT, 1)

    async def work() -> None:
        reader = Reader(a="")
        (said,) = data(await reader.until('"ok":true'), "feed")
        assert said == {"ok": True, "silent_since": "1970-01-01T00:00:01+00:00"}
        health.beat()
        publish(A, run={"id": A})  # the reader looks after each answer
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


def test_without_redis_the_page_is_told_so(settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"

    async def work() -> None:
        reader = Reader(a="5-0")
        frames = await reader.until('"ok":false')
        assert not deltas(frames)
        assert data(frames, "resync") == [{}]  # what was missed cannot be told
        await reader.close()

    watch(work)


def test_an_idle_stream_has_a_heart_beat(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    monkeypatch.setattr(feed, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(feed, "RETRY_S", 60)

    async def work() -> None:
        reader = Reader(a="")
        await reader.until("event: beat")
        await reader.close()

    watch(work)


@pytest.mark.processes
def test_the_reader_ends_with_the_last_viewer(
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
def test_what_is_an_id(text: str) -> None:
    assert replay.is_stream_id(text) == (text in ("5", "5-1"))
