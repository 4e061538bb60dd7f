"""Data structures of the fan-out: messages, viewers, and the replay buffer.

Without clock, Redis or sockets; :mod:`dashboard.live.feed` drives them.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

QUEUE_SIZE = 256
"""Maximum number of queued items per viewer."""
MAX_MESSAGES, MAX_BYTES = 4000, 32_000_000
"""Limits of the replay buffer for browsers that reconnect."""

RESYNC = b"event: resync\ndata: {}\n\n"

Key = tuple[int, int]
ZERO: Key = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One entry of the Redis stream. ``resync``: messages of the run were lost."""

    id: str
    run: str
    data: str
    resync: bool = False

    @cached_property
    def key(self) -> Key:
        return id_key(self.id)

    @cached_property
    def frame(self) -> bytes:
        """The frame for viewers of the run."""
        return self._frame(self.data)

    @cached_property
    def list_frame(self) -> bytes:
        """The frame for viewers of the list: only the run's header; empty if it is unchanged."""
        if self.resync:
            return self.frame
        header = json.loads(self.data).get("run")
        if header is None:
            return b""
        return self._frame(json.dumps({"run": header}, separators=(",", ":")))

    def _frame(self, delta: str) -> bytes:
        kind = "resync" if self.resync else "delta"
        return (
            f'id: {self.id}\nevent: {kind}\ndata: {{"topic":"{self.run}","delta":{delta}}}\n\n'
        ).encode()


@dataclass(frozen=True)
class Item:
    """A queued frame, with topic and key of its message."""

    frame: bytes
    topic: str = ""
    key: Key = ZERO


@dataclass(eq=False)
class Viewer:
    """The queue of one browser."""

    topics: frozenset[str]
    queue: deque[Item] = field(default_factory=deque)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    lost: bool = False
    position: Key = ZERO
    """The newest position that the viewer came with."""

    def push(self, item: Item) -> None:
        if len(self.queue) >= QUEUE_SIZE:
            self.queue.popleft()
            self.lost = True
        self.queue.append(item)
        self.ready.set()

    def drain(self) -> list[Item]:
        """All queued items, or only a resync if items were dropped."""
        items = [Item(RESYNC)] if self.lost else list(self.queue)
        self.queue.clear()
        self.lost = False
        self.ready.clear()
        return items


class ReplayBuffer:
    """The newest messages without a gap: all messages after :attr:`since`."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._size = 0
        self.since: Key = ZERO
        self.newest = ""

    def fill(self, messages: Iterable[Message]) -> None:
        """Replace the content, oldest first. Messages before the first are not known."""
        self._messages.clear()
        self._size, self.since, self.newest = 0, ZERO, "0-0"
        for message in messages:
            self.add(message)
        if self._messages:
            self.since = self._messages[0].key

    def add(self, message: Message) -> None:
        self._messages.append(message)
        self._size += len(message.data)
        self.newest = message.id
        while len(self._messages) > MAX_MESSAGES or (
            self._size > MAX_BYTES and len(self._messages) > 1
        ):
            old = self._messages.popleft()
            self._size -= len(old.data)
            self.since = old.key

    def after(self, key: Key) -> list[Message]:
        """Messages after ``key``, oldest first. Scans from the newest: a reconnect misses few."""
        newer: list[Message] = []
        for message in reversed(self._messages):
            if message.key <= key:
                break
            newer.append(message)
        return newer[::-1]


def parse(entry: tuple[str, dict[str, str]]) -> Message:
    entry_id, fields = entry
    return Message(
        id=entry_id,
        run=fields.get("run", ""),
        data=fields.get("data", "{}"),
        resync="resync" in fields,
    )


def id_key(stream_id: str) -> Key:
    """A stream id as comparable numbers. Raises ``ValueError`` if it is malformed."""
    milliseconds, _, sequence = stream_id.partition("-")
    return int(milliseconds), int(sequence or 0)


def is_stream_id(text: str) -> bool:
    try:
        id_key(text)
    except ValueError:
        return False
    return True
