"""Server-sent events: one reader per web process follows Redis and fans out to its viewers.

::

    worker --XADD--> archipelago:live --XREAD--> Feed --> Viewer (bounded queue) --> browser
                                                  |-----> Viewer
                                                  `-----> ...

A viewer is a browser (its tabs share one stream) and follows *topics*: runs by their id, and
:data:`LIST`, the headers of all runs. The id of an event is the id in the Redis stream, so a
browser that reconnects says where it was (``Last-Event-ID``) and is sent what it missed, out of
the newest messages that the reader keeps. What a viewer cannot be sent (its queue was full, the
id is too old) becomes a ``resync`` event: load the snapshot again. While Redis is away viewers are
told by ``feed`` events and poll; a stream never ends because of it. These say as well when no
worker is at work: then nothing else would come.

An idle viewer costs its queue and its socket: no thread, no connection to Redis, and none to the
database, for views authenticate and close it before they stream. https://html.spec.whatwg.org/
multipage/server-sent-events.html has the format.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import weakref
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from typing import Any

from django.conf import settings
from django.utils import timezone
from redis.asyncio import Redis
from redis.exceptions import RedisError

from dashboard.live import replay as fanout
from dashboard.live.replay import (
    RESYNC,
    ZERO,
    Item,
    Kept,
    Key,
    Message,
    Viewer,
    id_key,
    is_stream_id,
    parse,
)
from runs.backends import health
from runs.live_stream import STREAM

logger = logging.getLogger(__name__)

LIST = "list"
"""The topic of the runs list."""

HEARTBEAT_S = 15.0
"""A beat this often keeps proxies from closing an idle stream, finds browsers that left, and
brings the browser's ``Last-Event-ID`` up to date although nothing was for it."""

MAX_STREAM_S = 900.0
"""Then the stream ends and the browser comes again, which checks the session anew."""

RECHECK_S = 60.0
"""So often it is asked whether the viewer may still watch; at the next beat, so a little later."""

MAX_TOPICS = 64
PER_SESSION = int(os.environ.get("ARCHIPELAGO_STREAMS_PER_SESSION", "8"))
"""Streams of one session in one web process. The tabs of a browser share one stream, so more than a
few are no browser's."""
PER_USER = int(os.environ.get("ARCHIPELAGO_STREAMS_PER_USER", "24"))
"""Streams of one user, who can have several browsers."""
LOAD_SIZE = 250
BLOCK_MS = 5000
RETRY_S = 1.0
CHECKS = 8
"""Sign-ins that are looked up at once, each with a database connection of its own."""

RETRY_HINT = b"retry: 1500\n\n"
HEARTBEAT = b"event: beat\ndata: {}\n\n"
LOOK_S = 5.0
"""How often the reader looks whether a worker is at work."""


class Feed:
    """Follows the Redis stream for as long as somebody watches."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._viewers: dict[str, set[Viewer]] = {}
        self._all: set[Viewer] = set()
        self._reader: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()
        self.kept = Kept()
        self.open: Counter[str] = Counter()
        """Streams by session and by user, as :func:`holders` names them."""
        self.checks = asyncio.Semaphore(CHECKS)
        self.ok = False
        """Whether Redis answered last time."""
        self.silent_since: str | None = None
        """As :func:`runs.backends.health.silent_since`."""

    def __len__(self) -> int:
        """How many watch."""
        return len(self._all)

    @contextlib.asynccontextmanager
    async def watch(self, topics: Iterable[str]) -> AsyncIterator[Viewer]:
        viewer = Viewer(frozenset(topics))
        self._all.add(viewer)
        for topic in viewer.topics:
            self._viewers.setdefault(topic, set()).add(viewer)
        if self._reader is None or self._reader.done():
            self.ok = False
            self._asked.clear()
            self._reader = asyncio.create_task(self._follow(), name="live-reader")
        else:
            viewer.push(Item(self._frame()))
        try:
            # Until the reader knows where it starts, a replay could end before that place.
            await self._asked.wait()
            yield viewer
        finally:
            self._forget(viewer)

    def is_full(self, holders: Mapping[str, int]) -> bool:
        """Whether one of them has as many streams as it can have."""
        return any(self.open[holder] >= limit for holder, limit in holders.items())

    @contextlib.contextmanager
    def hold(self, holders: Mapping[str, int]) -> Iterator[bool]:
        """Count a stream for as long as it lasts; False if it is one too many."""
        if self.is_full(holders):
            yield False
            return
        self.open.update(dict.fromkeys(holders, 1))
        try:
            yield True
        finally:
            self.open.subtract(dict.fromkeys(holders, 1))
            for holder in holders:
                if self.open[holder] <= 0:
                    del self.open[holder]

    def _forget(self, viewer: Viewer) -> None:
        self._all.discard(viewer)
        for topic in viewer.topics:
            others = self._viewers[topic]
            others.discard(viewer)
            if not others:
                del self._viewers[topic]
        if not self._all and self._reader is not None:
            self._reader.cancel()
            self._reader = None

    async def _follow(self) -> None:
        # Python's wait_for, which the client uses, may swallow a cancellation: hence the question.
        me = asyncio.current_task()
        first = True
        while self._reader is me:
            redis = Redis.from_url(
                self._url, decode_responses=True, socket_connect_timeout=2,
                socket_timeout=BLOCK_MS / 1000 + 5,
            )  # fmt: skip
            try:
                found: Any = await newest(redis)
                if self._reader is not me:
                    return
                self.kept.fill(found)
                await self._look(redis)
                looked = asyncio.get_running_loop().time()
                self._tell(ok=True)
                if not first:
                    # Away for a while; entries may have been trimmed, or the server replaced.
                    self._say(RESYNC)
                first = False
                while True:
                    found = await redis.xread({STREAM: self.kept.newest}, count=500, block=BLOCK_MS)
                    if self._reader is not me:
                        return
                    for _, entries in found or ():
                        for message in map(parse, entries):
                            self._pass_on(message)
                    if asyncio.get_running_loop().time() - looked >= LOOK_S:
                        looked = asyncio.get_running_loop().time()
                        if await self._look(redis):
                            self._say(self._frame())
            except (RedisError, OSError) as error:
                if self.ok or first:
                    logger.warning("live stream: %s is away: %s", STREAM, error)
                first = False
                self._tell(ok=False)
            finally:
                with contextlib.suppress(RedisError, OSError):
                    await redis.aclose()
            await asyncio.sleep(RETRY_S)

    def _pass_on(self, message: Message) -> None:
        self.kept.add(message)
        of_run = self._viewers.get(message.run, set())
        if of_run:
            item = Item(message.frame, message.run, message.key)
            for viewer in of_run:
                viewer.push(item)
        of_list = self._viewers.get(LIST)
        if of_list and message.list_frame:
            item = Item(message.list_frame, LIST, message.key)
            for viewer in of_list:
                if viewer not in of_run:
                    viewer.push(item)

    def _tell(self, *, ok: bool) -> None:
        self.ok = ok
        self._asked.set()
        self._say(self._frame())

    async def _look(self, redis: Redis) -> bool:
        """Whether a worker is at work; True if that is otherwise than it was."""
        written = await redis.get(health.HEARTBEAT)
        before, self.silent_since = self.silent_since, health.since(written, now=timezone.now())
        return self.silent_since != before

    def _frame(self) -> bytes:
        said = {"ok": self.ok, "silent_since": self.silent_since if self.ok else None}
        return f"event: feed\ndata: {json.dumps(said, separators=(',', ':'))}\n\n".encode()

    def _say(self, frame: bytes) -> None:
        item = Item(frame)
        for viewer in self._all:
            viewer.push(item)

    def replay(self, floors: Mapping[str, Key]) -> list[bytes]:
        """What viewers of these topics were sent after the key of each; a resync where that is
        too long ago to say, or Redis is away."""
        if not floors:
            return []
        if not self.ok or min(floors.values()) < self.kept.since:
            return [RESYNC]
        frames: list[bytes] = []
        for message in self.kept.after(min(floors.values())):
            if message.key > floors.get(message.run, message.key):
                frames.append(message.frame)
            elif message.key > floors.get(LIST, message.key):
                frames.append(message.list_frame)
        return frames


async def newest(redis: Redis) -> list[Message]:
    """As many of the newest messages as are kept, oldest first."""
    found: list[Message] = []
    size, last = 0, "+"
    while len(found) < fanout.KEPT and size < fanout.KEPT_BYTES:
        entries: Any = await redis.xrevrange(STREAM, max=last, count=LOAD_SIZE)
        found += map(parse, entries)
        size += sum(len(fields.get("data", "")) for _, fields in entries)
        if len(entries) < LOAD_SIZE:
            break
        last = f"({entries[-1][0]}"
    return found[::-1]


_feeds: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Feed] = weakref.WeakKeyDictionary()


def feed() -> Feed:
    """The feed of this process (of its event loop)."""
    loop = asyncio.get_running_loop()
    if loop not in _feeds:
        _feeds[loop] = Feed(settings.REDIS_URL)
    return _feeds[loop]


def holders(user_id: Any, session_key: str | None) -> dict[str, int]:
    """Whose streams are counted together, and how many there can be."""
    found = {f"user {user_id}": PER_USER}
    if session_key:
        found[f"session {session_key}"] = PER_SESSION
    return found


async def bounded_events(
    holders: Mapping[str, int], *, topics: Mapping[str, str], **options: Any
) -> AsyncIterator[bytes]:
    """:func:`events`, counted for ``holders`` until the stream has ended."""
    with feed().hold(holders) as has_room:
        if has_room:
            async with contextlib.aclosing(events(topics=topics, **options)) as frames:
                async for frame in frames:
                    yield frame


async def events(
    *,
    topics: Mapping[str, str],
    last_event_id: str = "",
    still: Callable[[], Awaitable[bool]] | None = None,
) -> AsyncGenerator[bytes]:
    """The bytes of one viewer's stream. ``topics`` are what it follows and where it is with each,
    '' if it knows nothing; ``last_event_id`` is where it was with all of them. ``still`` says
    whether it may go on; asked every :data:`RECHECK_S`."""
    source = feed()
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + MAX_STREAM_S
    # Not all at the same moment for a thousand who came at the same moment.
    check_at = loop.time() + RECHECK_S * random.uniform(0.8, 1.0)
    async with source.watch(topics) as viewer:
        yield RETRY_HINT
        # Watching has begun, so nothing falls between the replay and what comes live.
        floors = _floors(topics, last_event_id)
        if missed := b"".join(source.replay(floors)):
            yield missed
        if source.ok:  # with everything up to here sent, later is what counts
            here = id_key(source.kept.newest)
            floors = {topic: max(floors.get(topic, ZERO), here) for topic in topics}
        while loop.time() < ends_at:
            if still is not None and loop.time() >= check_at:
                check_at = loop.time() + RECHECK_S
                if not await still():
                    return
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await viewer.ready.wait()
            except TimeoutError:
                yield beat(source.kept.newest) if source.ok else HEARTBEAT
                continue
            frames: list[bytes] = []
            for item in viewer.drain():
                if item.frame is RESYNC:
                    floors = {}  # of a server that may have been replaced
                if not item.topic or item.key > floors.get(item.topic, ZERO):
                    frames.append(item.frame)
            if frames:
                yield b"".join(frames)


def beat(newest_id: str) -> bytes:
    return f"id: {newest_id}\nevent: beat\ndata: {{}}\n\n".encode()


def _floors(topics: Mapping[str, str], last_event_id: str) -> dict[str, Key]:
    """Where the viewer is with each topic it knows anything of."""
    last = id_key(last_event_id) if is_stream_id(last_event_id) else ZERO
    found: dict[str, Key] = {}
    for topic, after in topics.items():
        if is_stream_id(after):
            found[topic] = max(id_key(after), last)
        elif last > ZERO:
            found[topic] = last
    return found
