"""Server-sent events: one reader per web process follows Redis and fans out to its viewers.

::

    worker --XADD--> archipelago:live --XREAD--> Feed --> Viewer (bounded queue) --> browser
                                                  |-----> Viewer
                                                  `-----> ...

The id of an event is the id in the Redis stream, so a browser that reconnects says where it was
(``Last-Event-ID``) and is sent what it missed. What a viewer cannot be sent (its queue was full,
the id has been trimmed away) becomes one ``resync`` event: load the snapshot again. While Redis
is away viewers are told by ``feed`` events and poll; a stream never ends because of it.

No database connection is touched here: views authenticate and close it before they stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from django.conf import settings
from redis.asyncio import Redis
from redis.exceptions import RedisError

from runs.live import STREAM

logger = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
"""A comment this often keeps proxies from closing an idle stream and finds browsers that left."""

MAX_STREAM_S = 900.0
"""Then the stream ends and the browser comes again, which checks the session anew."""

QUEUE_SIZE = 256
REPLAY_LIMIT = 2000
BLOCK_MS = 5000
RETRY_S = 1.0

RETRY_HINT = "retry: 1500\n\n"
HEARTBEAT = ": beat\n\n"
RESYNC = "event: resync\ndata: {}\n\n"
FEED_ON = 'event: feed\ndata: {"ok":true}\n\n'
FEED_OFF = 'event: feed\ndata: {"ok":false}\n\n'


@dataclass(frozen=True, kw_only=True)
class Message:
    """One entry of the Redis stream."""

    id: str
    run: str
    data: str

    def frame(self, *, run: str | None) -> str:
        """As a run's page wants it, or as the list does (``run`` None): only its ``run`` part."""
        return self._run_frame if run is not None else self._list_frame

    @cached_property
    def _run_frame(self) -> str:
        return f"id: {self.id}\nevent: delta\ndata: {self.data}\n\n"

    @cached_property
    def _list_frame(self) -> str:
        header = json.loads(self.data).get("run")
        if header is None:
            return ""
        body = json.dumps({"run": header}, separators=(",", ":"))
        return f"id: {self.id}\nevent: delta\ndata: {body}\n\n"


@dataclass(eq=False)
class Viewer:
    """A browser's place in the fan-out. ``run`` None watches the runs list."""

    run: str | None
    queue: deque[Message | str] = field(default_factory=deque)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    lost: bool = False

    def wants(self, message: Message) -> bool:
        return self.run is None or self.run == message.run

    def push(self, item: Message | str) -> None:
        if len(self.queue) >= QUEUE_SIZE:
            self.queue.popleft()
            self.lost = True
        self.queue.append(item)
        self.ready.set()

    def drain(self) -> list[Message | str]:
        """Everything queued; just a resync if something had to be dropped."""
        items: list[Message | str] = [RESYNC] if self.lost else list(self.queue)
        self.queue.clear()
        self.lost = False
        self.ready.clear()
        return items


class Feed:
    """Follows the Redis stream for as long as somebody watches."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._viewers: set[Viewer] = set()
        self._reader: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()
        self.ok = False
        """Whether Redis answered last time."""

    @contextlib.asynccontextmanager
    async def watch(self, run: str | None) -> AsyncIterator[Viewer]:
        viewer = Viewer(run)
        self._viewers.add(viewer)
        if self._reader is None or self._reader.done():
            self.ok = False
            self._asked.clear()
            self._reader = asyncio.create_task(self._follow(), name="live-reader")
        else:
            viewer.push(FEED_ON if self.ok else FEED_OFF)
        try:
            # Until the reader knows where it starts, a replay could end before that place.
            await self._asked.wait()
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._reader is not None:
                self._reader.cancel()
                self._reader = None

    async def _follow(self) -> None:
        last = ""
        while True:
            redis = Redis.from_url(
                self._url, decode_responses=True, socket_connect_timeout=2,
                socket_timeout=BLOCK_MS / 1000 + 5,
            )  # fmt: skip
            try:
                if not last:
                    last = await newest_id(redis)
                    self._tell(ok=True)
                elif not self.ok:
                    # Away for a while; entries may have been trimmed, or the server replaced.
                    last = await newest_id(redis)
                    self._tell(ok=True)
                    self._say(RESYNC)
                while True:
                    found: Any = await redis.xread({STREAM: last}, count=500, block=BLOCK_MS)
                    for _, entries in found or ():
                        for message in map(parse, entries):
                            last = message.id
                            for viewer in self._viewers:
                                if viewer.wants(message):
                                    viewer.push(message)
            except (RedisError, OSError) as error:
                if self.ok or not last:
                    logger.warning("live stream: %s is away: %s", STREAM, error)
                last = last or "0-0"
                self._tell(ok=False)
            finally:
                with contextlib.suppress(RedisError, OSError):
                    await redis.aclose()
            await asyncio.sleep(RETRY_S)

    def _tell(self, *, ok: bool) -> None:
        self.ok = ok
        self._asked.set()
        self._say(FEED_ON if ok else FEED_OFF)

    def _say(self, frame: str) -> None:
        for viewer in self._viewers:
            viewer.push(frame)

    async def replay(self, run: str | None, after: str) -> list[Message] | None:
        """What ``run`` (None: any) was sent after the id ``after``; None when that is too long
        ago to say, or Redis is away."""
        redis = Redis.from_url(
            self._url, decode_responses=True, socket_connect_timeout=2, socket_timeout=5
        )
        try:
            oldest: Any = await redis.xrange(STREAM, count=1)
            if oldest and id_key(oldest[0][0]) > id_key(after) and after != "0-0":
                return None
            entries: Any = await redis.xrange(STREAM, min=f"({after}", count=REPLAY_LIMIT + 1)
        except (RedisError, OSError):
            return None
        finally:
            with contextlib.suppress(RedisError, OSError):
                await redis.aclose()
        if len(entries) > REPLAY_LIMIT:
            return None
        return [m for m in map(parse, entries) if run is None or m.run == run]


def parse(entry: tuple[str, dict[str, str]]) -> Message:
    entry_id, fields = entry
    return Message(id=entry_id, run=fields.get("run", ""), data=fields.get("data", "{}"))


async def newest_id(redis: Redis) -> str:
    found: Any = await redis.xrevrange(STREAM, count=1)
    return str(found[0][0]) if found else "0-0"


def id_key(stream_id: str) -> tuple[int, int]:
    """A stream id as numbers, to compare. Raises ``ValueError`` for anything else."""
    milliseconds, _, sequence = stream_id.partition("-")
    return int(milliseconds), int(sequence or 0)


def is_stream_id(text: str) -> bool:
    try:
        id_key(text)
    except ValueError:
        return False
    return True


_feeds: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Feed] = weakref.WeakKeyDictionary()


def feed() -> Feed:
    """The feed of this process (of its event loop)."""
    loop = asyncio.get_running_loop()
    if loop not in _feeds:
        _feeds[loop] = Feed(settings.REDIS_URL)
    return _feeds[loop]


async def events(*, run: str | None, after: str) -> AsyncIterator[str]:
    """The text of one viewer's stream. ``after`` is where the viewer is, '' if it knows nothing."""
    source = feed()
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + MAX_STREAM_S
    sent = (0, 0)
    async with source.watch(run) as viewer:
        yield RETRY_HINT
        # Watching has begun, so nothing falls between the replay and what comes live.
        if after and is_stream_id(after):
            missed = await source.replay(run, after)
            if missed is None:
                yield RESYNC
            else:
                for message in missed:
                    sent = id_key(message.id)
                    if frame := message.frame(run=run):
                        yield frame
        while loop.time() < ends_at:
            try:
                await asyncio.wait_for(viewer.ready.wait(), HEARTBEAT_S)
            except TimeoutError:
                yield HEARTBEAT
                continue
            for item in viewer.drain():
                if isinstance(item, str):
                    yield item
                elif id_key(item.id) > sent:
                    sent = id_key(item.id)
                    if frame := item.frame(run=run):
                        yield frame
