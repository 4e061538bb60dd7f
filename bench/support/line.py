"""Lines between replicas and a store: a latency, a rate per connection and one for each replica.

:class:`LineStore` delays the operations on a folder; it costs little CPU time, so that a few cores
carry many replicas. :func:`proxied` delays the bytes of real connections to a real server.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import multiprocessing
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path

from diloco.clock import Clock, SystemClock
from diloco.store import s3
from diloco.store.base import LISTED, Data, LocalStore, MakeParts, ObjectInfo
from diloco.store.transfers import UPLOAD_LINE, Line

CHUNK = 2**16
MB = 1e6


@dataclass(frozen=True, kw_only=True)
class LineSpec:
    """``connection`` and ``total`` are bytes per second; ``total`` is of one replica."""

    latency_s: float
    connection: float
    total: float

    def __str__(self) -> str:
        return (
            f"{1000 * self.latency_s:.0f} ms, {self.connection / MB:.2f} MB/s per connection, "
            f"{self.total / MB:.1f} MB/s per replica"
        )


class LineStore(LocalStore):
    """A folder at the other end of a line, with multipart uploads like those of S3."""

    def __init__(
        self, root: Path, line: LineSpec, *, clock: Clock | None = None, uploads: Line = UPLOAD_LINE
    ) -> None:
        super().__init__(root)
        self._line = line
        self._clock = clock or SystemClock()
        self._uploads = uploads
        self._lock = threading.Lock()
        self._free_s = [0.0, 0.0]

    @contextlib.contextmanager
    def _delayed(self, *, up: int = 0) -> Iterator[list[int]]:
        """Delay the block by one request that carries ``up`` bytes, or those in the list down."""
        begun_s, down = self._clock.monotonic(), [0]
        try:
            yield down
        finally:
            size_bytes, direction = (up, 0) if up else (down[0], 1)
            self._sleep_until(self._end_s(begun_s, size_bytes, direction))

    def _end_s(self, begun_s: float, size_bytes: int, direction: int) -> float:
        """Take room on the line; return when a request that has begun then ends. A small one waits
        for no other, because connections share a line fairly."""
        first_s = begun_s + self._line.latency_s
        if size_bytes < CHUNK // 4:
            return first_s
        with self._lock:
            free_s = max(self._free_s[direction], first_s) + size_bytes / self._line.total
            self._free_s[direction] = free_s
        return max(free_s, first_s + size_bytes / self._line.connection)

    def _sleep_until(self, end_s: float) -> None:
        self._clock.sleep(max(0.0, end_s - self._clock.monotonic()))

    def put(self, key: str, data: Data) -> None:
        with self._delayed(up=len(data)):
            super().put(key, data)

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        sent: list[Data] = []
        parts = iter(make_parts())
        first = next(parts, b"")
        second = next(parts, None)
        if second is None:
            self.put(key, first)
            return
        with self._delayed():
            pass  # the request that begins a multipart upload
        count = None if size_bytes is None else -(-size_bytes // s3.PART_BYTES)
        with self._uploads.measured(count) as stream:
            ends_s: list[float] = []
            for part in stream.counted(chain((first, second), parts)):
                if len(ends_s) >= stream.limit:
                    self._sleep_until(heapq.heappop(ends_s))
                sent.append(part)
                heapq.heappush(ends_s, self._end_s(self._clock.monotonic(), len(part), 0))
            self._sleep_until(max(ends_s))
        with self._delayed():
            super().put_stream(key, lambda: sent)

    def create(self, key: str, data: Data) -> bool:
        with self._delayed(up=len(data)):
            return super().create(key, data)

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        with self._delayed() as down:
            data = super().get(key, limit=limit)
            down[0] = len(data)
            return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._delayed() as down:
            data = super().get_range(key, start, length)
            down[0] = len(data)
            return data

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        with self._delayed():
            return super().list(prefix, limit=limit)

    def delete(self, keys: Iterable[str]) -> None:
        with self._delayed():
            super().delete(keys)


# -- real connections ----------------------------------------------------------------------------


@contextlib.contextmanager
def proxied(target: str, line: LineSpec, replicas: int) -> Iterator[list[str]]:
    """Yield an address for each replica: its own line to the server at ``target`` (host:port)."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(target, line, replicas, sender), daemon=True)
    process.start()
    try:
        yield [f"http://127.0.0.1:{port}" for port in receiver.recv()]
    finally:
        process.terminate()
        process.join()


def _serve(target: str, line: LineSpec, replicas: int, ports: Connection) -> None:
    asyncio.run(_serve_lines(target, line, replicas, ports))


async def _serve_lines(target: str, line: LineSpec, replicas: int, ports: Connection) -> None:
    host, _, port = target.rpartition(":")
    servers = []
    for _ in range(replicas):
        total = {"up": _Bucket(line.total), "down": _Bucket(line.total)}

        async def connected(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            total: dict[str, _Bucket] = total,
        ) -> None:
            there, back = await asyncio.open_connection(host, int(port), limit=CHUNK)
            await asyncio.gather(
                _pump(reader, back, line, total["up"]), _pump(there, writer, line, total["down"])
            )

        server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=CHUNK)
        servers.append(server)
    ports.send([server.sockets[0].getsockname()[1] for server in servers])
    await asyncio.gather(*(server.serve_forever() for server in servers))


class _Bucket:
    """A token bucket without depth: when the next bytes can pass."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_s = 0.0

    def passes_s(self, size_bytes: int) -> float:
        """Take ``size_bytes``; return when the last of them has passed."""
        self._free_s = max(self._free_s, time.monotonic()) + size_bytes / self._rate
        return self._free_s


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: LineSpec, total: _Bucket
) -> None:
    """Move one direction of a connection: at its rates, half a latency late."""
    connection = _Bucket(line.connection)
    delayed: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            at_s, data = await delayed.get()
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            if not data:
                return
            writer.write(data)
            await writer.drain()

    with contextlib.suppress(OSError, asyncio.CancelledError):
        delivering = asyncio.create_task(deliver())
        while not delivering.done():
            data = await reader.read(CHUNK)
            passed_s = max(connection.passes_s(len(data)), total.passes_s(len(data)))
            await asyncio.sleep(max(0.0, passed_s - time.monotonic()))
            delayed.put_nowait((passed_s + line.latency_s / 2, data))
            if not data:
                break
        await delivering
    writer.close()
