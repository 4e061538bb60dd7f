"""Server-sent events: one reader per web process follows Redis and fans messages out to viewers.

::

    worker --XADD--> archipelago:live --XREAD--> Feed --> Viewer (bounded queue) --> browser
                                                  |-----> Viewer
                                                  `-----> ...

A viewer is a browser (its tabs share one stream). It follows *topics*: runs by their id,
:data:`LIST`, the headers of all runs, and :data:`~runs.live_stream.ALERTS`, changes of alerts. The
id of an event is its id in the Redis stream. A browser that reconnects sends its last id
(``Last-Event-ID``) and gets the messages that it missed, from the replay buffer of the reader. If
it cannot (full queue, old id), it gets a ``resync`` event and loads the snapshot again. While Redis
is down, viewers get ``feed`` events and poll; streams do not end. ``feed`` events also report that
no worker is running, because then no messages come.

An idle viewer costs its queue and its socket: no thread and no connection to Redis or the database,
because views authenticate and close their connection before they stream. The format is described at
https://html.spec.whatwg.org/multipage/server-sent-events.html.
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
    Key,
    Message,
    ReplayBuffer,
    Viewer,
    id_key,
    is_stream_id,
    parse,
)
from runs.backends import health
from runs.live_stream import ALERTS, STREAM

logger = logging.getLogger(__name__)

LIST = "list"
"""The topic of the runs list."""
SHARED = frozenset({LIST, ALERTS})
"""Topics that belong to no single run. Every user with a role can follow them."""

HEARTBEAT_S = 15.0
"""Interval of heartbeats. They keep proxies from closing an idle stream, detect browsers that left,
and update the ``Last-Event-ID`` of the browser."""

MAX_STREAM_S = 900.0
"""Maximum duration of a stream. The browser then reconnects, which authenticates it again."""

RECHECK_S = 60.0
"""Interval for checking whether the viewer is still authorized. The check runs at the next
heartbeat, so it can be a little later."""

MAX_TOPICS = 64
PER_SESSION = int(os.environ.get("ARCHIPELAGO_STREAMS_PER_SESSION", "8"))
"""Streams of one session per web process. The tabs of a browser share one stream, so a browser
needs only a few."""
PER_USER = int(os.environ.get("ARCHIPELAGO_STREAMS_PER_USER", "24"))
"""Streams of one user per web process. A user can have several browsers."""
LOAD_SIZE = 250
BLOCK_MS = 5000
RETRY_S = 1.0
CHECKS = 8
"""Maximum number of concurrent authentications, each with a database connection."""

RETRY_HINT = b"retry: 1500\n\n"
HEARTBEAT = b"event: beat\ndata: {}\n\n"
CHECK_S = 5.0
"""Interval for checking whether a worker is running, and whether Redis was replaced."""


class Feed:
    """Follows the Redis stream while there are viewers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._viewers: dict[str, set[Viewer]] = {}
        self._all: set[Viewer] = set()
        self._reader: asyncio.Task[None] | None = None
        self._positioned = asyncio.Event()
        self.replay_buffer = ReplayBuffer()
        self.open: Counter[str] = Counter()
        """Number of streams by session and by user; :func:`holders` names the keys."""
        self.checks = asyncio.Semaphore(CHECKS)
        self.ok = False
        """Whether Redis responded last time."""
        self.silent_since: str | None = None
        """See :func:`runs.backends.health.silent_since`."""

    def __len__(self) -> int:
        """Number of viewers."""
        return len(self._all)

    @contextlib.asynccontextmanager
    async def watch(self, topics: Iterable[str]) -> AsyncIterator[Viewer]:
        viewer = Viewer(frozenset(topics))
        self._all.add(viewer)
        for topic in viewer.topics:
            self._viewers.setdefault(topic, set()).add(viewer)
        if self._reader is None or self._reader.done():
            self.ok = False
            self._positioned.clear()
            self._reader = asyncio.create_task(self._follow(), name="live-reader")
        else:
            viewer.push(Item(self._frame()))
        try:
            # Wait until the position of the reader is set: otherwise a replay could leave a gap.
            await self._positioned.wait()
            yield viewer
        finally:
            self._forget(viewer)

    def is_full(self, holders: Mapping[str, int]) -> bool:
        """Whether one of the holders has reached its limit of streams."""
        return any(self.open[holder] >= limit for holder, limit in holders.items())

    @contextlib.contextmanager
    def hold(self, holders: Mapping[str, int]) -> Iterator[bool]:
        """Count a stream while it is open. Yields False if it exceeds a limit."""
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
        # wait_for, which the client uses, can swallow a cancellation: hence the check.
        own_task = asyncio.current_task()
        first = True
        while self._reader is own_task:
            redis = Redis.from_url(
                self._url,
                decode_responses=True,
                socket_connect_timeout=2,
                socket_timeout=BLOCK_MS / 1000 + 5,
            )
            try:
                batch: Any = await newest(redis)
                if self._reader is not own_task:
                    return
                self.replay_buffer.fill(batch)
                await self._check_workers(redis)
                checked_at = asyncio.get_running_loop().time()
                self._report(ok=True)
                if not first:
                    # After an outage or a check: entries can be trimmed, or the server replaced.
                    self._broadcast(RESYNC)
                first = False
                while self._reader is own_task:
                    batch = await redis.xread(
                        {STREAM: self.replay_buffer.newest}, count=500, block=BLOCK_MS
                    )
                    if self._reader is not own_task:
                        return
                    for _, entries in batch or ():
                        for message in map(parse, entries):
                            self._fan_out(message)
                    if asyncio.get_running_loop().time() - checked_at >= CHECK_S:
                        checked_at = asyncio.get_running_loop().time()
                        if await self._check_workers(redis):
                            self._broadcast(self._frame())
                        if not await self._check_positions(redis):
                            break
            except (RedisError, OSError) as error:
                if self.ok or first:
                    logger.warning("live stream: %s is not reachable: %s", STREAM, error)
                first = False
                self._report(ok=False)
            finally:
                with contextlib.suppress(RedisError, OSError):
                    await redis.aclose()
            await asyncio.sleep(RETRY_S)

    def _fan_out(self, message: Message) -> None:
        self.replay_buffer.add(message)
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

    def _report(self, *, ok: bool) -> None:
        self.ok = ok
        self._positioned.set()
        self._broadcast(self._frame())

    async def _check_workers(self, redis: Redis) -> bool:
        """Update :attr:`silent_since`. Returns whether it changed."""
        written = await redis.get(health.HEARTBEAT)
        before, self.silent_since = self.silent_since, health.since(written, now=timezone.now())
        return self.silent_since != before

    async def _check_positions(self, redis: Redis) -> bool:
        """Whether the stream still has the position of this reader. A position after its last entry
        is one of another server, whose clock was ahead, or of a stream that was deleted; entries
        that come now are before it. Viewers with such a position load their snapshot again."""
        entries: Any = await redis.xrevrange(STREAM, count=1)
        last = parse(entries[0]).key if entries else ZERO
        for viewer in self._all:
            if viewer.position > last:
                viewer.push(Item(RESYNC))
        return id_key(self.replay_buffer.newest) <= last

    def _frame(self) -> bytes:
        state = {"ok": self.ok, "silent_since": self.silent_since if self.ok else None}
        return f"event: feed\ndata: {json.dumps(state, separators=(',', ':'))}\n\n".encode()

    def _broadcast(self, frame: bytes) -> None:
        item = Item(frame)
        for viewer in self._all:
            viewer.push(item)

    def replay(self, cursors: Mapping[str, Key]) -> list[bytes]:
        """Frames that viewers of these topics got after the cursor of each; a resync if a cursor is
        too old or Redis is down."""
        if not cursors:
            return []
        if not self.ok or min(cursors.values()) < self.replay_buffer.since:
            return [RESYNC]
        frames: list[bytes] = []
        for message in self.replay_buffer.after(min(cursors.values())):
            if message.key > cursors.get(message.run, message.key):
                frames.append(message.frame)
            elif message.key > cursors.get(LIST, message.key):
                frames.append(message.list_frame)
        return frames


async def newest(redis: Redis) -> list[Message]:
    """The newest messages for the replay buffer, oldest first."""
    messages: list[Message] = []
    size, last = 0, "+"
    while len(messages) < fanout.MAX_MESSAGES and size < fanout.MAX_BYTES:
        entries: Any = await redis.xrevrange(STREAM, max=last, count=LOAD_SIZE)
        messages += map(parse, entries)
        size += sum(len(fields.get("data", "")) for _, fields in entries)
        if len(entries) < LOAD_SIZE:
            break
        last = f"({entries[-1][0]}"
    return messages[::-1]


_feeds: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Feed] = weakref.WeakKeyDictionary()


def feed() -> Feed:
    """The feed of this process (more precisely of its event loop)."""
    loop = asyncio.get_running_loop()
    if loop not in _feeds:
        _feeds[loop] = Feed(settings.REDIS_URL)
    return _feeds[loop]


def holders(user_id: Any, session_key: str | None) -> dict[str, int]:
    """Keys under which a stream is counted, with the limit of each."""
    limits = {f"user {user_id}": PER_USER}
    if session_key:
        limits[f"session {session_key}"] = PER_SESSION
    return limits


async def bounded_events(
    holders: Mapping[str, int], *, topics: Mapping[str, str], **options: Any
) -> AsyncIterator[bytes]:
    """:func:`events`, counted for ``holders`` until the stream ends."""
    with feed().hold(holders) as has_room:
        if has_room:
            async with contextlib.aclosing(events(topics=topics, **options)) as frames:
                async for frame in frames:
                    yield frame


async def events(
    *,
    topics: Mapping[str, str],
    last_event_id: str = "",
    is_authorized: Callable[[], Awaitable[bool]] | None = None,
) -> AsyncGenerator[bytes]:
    """The byte stream of one viewer.

    Args:
        topics: The followed topics, each with the id up to which the viewer has it, or ''.
        last_event_id: The id up to which the viewer has all topics.
        is_authorized: Whether the viewer can continue; called every :data:`RECHECK_S`.
    """
    source = feed()
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + MAX_STREAM_S
    # Jitter: viewers who connected at the same moment are not all checked at the same moment.
    check_at = loop.time() + RECHECK_S * random.uniform(0.8, 1.0)
    async with source.watch(topics) as viewer:
        yield RETRY_HINT
        # The viewer is registered, so no message is lost between the replay and the live ones.
        cursors = _cursors(topics, last_event_id)
        viewer.position = max(cursors.values(), default=ZERO)
        if missed := b"".join(source.replay(cursors)):
            yield missed
        if source.ok:  # everything up to here was sent
            here = id_key(source.replay_buffer.newest)
            cursors = {topic: max(cursors.get(topic, ZERO), here) for topic in topics}
            yield heartbeat(source.replay_buffer.newest)  # a viewer may have had no position
        while loop.time() < ends_at:
            if is_authorized is not None and loop.time() >= check_at:
                check_at = loop.time() + RECHECK_S
                if not await is_authorized():
                    return
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await viewer.ready.wait()
            except TimeoutError:
                yield heartbeat(source.replay_buffer.newest) if source.ok else HEARTBEAT
                continue
            frames: list[bytes] = []
            for item in viewer.drain():
                if item.frame is RESYNC:  # the server may have been replaced
                    cursors, viewer.position = {}, ZERO
                if not item.topic or item.key > cursors.get(item.topic, ZERO):
                    frames.append(item.frame)
            if RESYNC in frames and source.ok:
                frames.append(heartbeat(source.replay_buffer.newest))
            if frames:
                yield b"".join(frames)


def heartbeat(newest_id: str) -> bytes:
    return f"id: {newest_id}\nevent: beat\ndata: {{}}\n\n".encode()


def _cursors(topics: Mapping[str, str], last_event_id: str) -> dict[str, Key]:
    """Position of the viewer in each topic of which it has any message."""
    last = id_key(last_event_id) if is_stream_id(last_event_id) else ZERO
    cursors: dict[str, Key] = {}
    for topic, after in topics.items():
        if is_stream_id(after):
            cursors[topic] = max(id_key(after), last)
        elif last > ZERO:
            cursors[topic] = last
    return cursors
