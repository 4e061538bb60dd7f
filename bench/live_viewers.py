"""How fast a delta reaches a thousand browsers on one web process, and what they cost it.

Real uvicorn and Valkey; the browsers are sockets of one other process on the same machine, which
takes their frames apart. *Latency* is from before the delta is published to when the frame has been
read, so that it holds the client's own queueing as well. Three audiences: all of them on one run,
spread over twenty runs, and all on the runs list (which receives every run's changes).

Usage: python bench/live_viewers.py [--viewers 1000] [--seconds 20] [--delta-bytes 3000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import redis

from bench.support.web import SIGN_IN, Web, running_web

RUNS = 20
STREAM = "archipelago:live"
OPEN_AT_ONCE = 50
SETTLE_S = 2.0

_PREPARE = f"""
{SIGN_IN}
import uuid
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import ByteGPTWorkload
from runs.submit.create import create_run
from runs.submit.run_draft import PoolDraft, RunDraft
user, session = sign_in()
print(session)
for n in range({RUNS}):
    draft = RunDraft(name=f"run {{n}}", settings=GroupSettings(num_replicas=2),
                     workload=ByteGPTWorkload(), pools=(PoolDraft(count=2),))
    print(create_run(draft, owner=user, submit_key=uuid.uuid4().hex).pk)
"""


@dataclass
class Audience(asyncio.Protocol):
    """One viewer: reads frames, notes how old each delta is."""

    request: bytes
    ages: list[float]
    ready: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    tail: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        text = self.tail + data
        if not self.ready.done() and (b'"ok":' in text or b" 200 " not in text[:20]):
            if b" 200 " in text[:20]:
                self.ready.set_result(None)
            else:
                self.ready.set_exception(RuntimeError(text[:200].decode()))
        *frames, self.tail = text.split(b"\n\n")
        if not self.ready.done():
            self.tail = text
        for frame in frames:
            found = re.search(rb'"sent":([0-9.]+)', frame)
            if found:
                self.ages.append(now - float(found[1]))


@dataclass(frozen=True, kw_only=True)
class Figures:
    ages: list[float]
    expected: int
    opened_s: float
    cpu: float
    rss_mb: float
    threads: int


def request(web: Web, path: str, session: str) -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{web.port}\r\nCookie: sessionid={session}\r\n"
        "Accept: text/event-stream\r\n\r\n"
    ).encode()


async def measure(
    web: Web, session: str, paths: Sequence[str], runs: Sequence[str], seconds: int, size: int
) -> Figures:
    """Open one stream per path, publish to each of ``runs`` once a second."""
    loop = asyncio.get_running_loop()
    ages: list[float] = []
    gate = asyncio.Semaphore(OPEN_AT_ONCE)
    transports: list[asyncio.BaseTransport] = []

    async def watch(path: str) -> None:
        async with gate:
            transport, viewer = await loop.create_connection(
                lambda: Audience(request(web, path, session), ages), "127.0.0.1", web.port
            )
            transports.append(transport)
            await viewer.ready

    begun = time.monotonic()
    await asyncio.gather(*(watch(path) for path in paths))
    opened_s = time.monotonic() - begun
    await asyncio.sleep(SETTLE_S)
    server = psutil.Process(web.pid)
    cpu = sum(server.cpu_times()[:2])
    begun = time.monotonic()
    client = redis.asyncio.Redis.from_url(web.redis_url)
    filler = "x" * size
    for n in range(seconds * len(runs)):
        await asyncio.sleep(max(0.0, begun + n / len(runs) - time.monotonic()))
        run = runs[n % len(runs)]
        delta = {"run": {"id": run, "sent": time.monotonic()}, "replicas": [filler]}
        await client.xadd(
            STREAM, {"run": run, "data": json.dumps(delta, separators=(",", ":"))}, maxlen=10_000
        )
    await client.aclose()
    await asyncio.sleep(SETTLE_S)
    took = time.monotonic() - begun
    watched = [sum(f"/{run}/" in path or path == "/stream" for path in paths) for run in runs]
    figures = Figures(
        ages=ages,
        expected=sum(watched) * seconds,
        opened_s=opened_s,
        cpu=(sum(server.cpu_times()[:2]) - cpu) / took,
        rss_mb=server.memory_info().rss / 1e6,
        threads=server.num_threads(),
    )
    for transport in transports:
        transport.close()
    await asyncio.sleep(SETTLE_S)
    return figures


def line(name: str, viewers: int, rate: int, f: Figures, idle_rss_mb: float) -> str:
    ages = sorted(1000 * age for age in f.ages)

    def at(share: float) -> str:
        return f"{ages[min(int(len(ages) * share), len(ages) - 1)]:.0f}" if ages else "-"

    return (
        f"| {name} | {viewers:,} | {rate} | {len(ages):,} of {f.expected:,} | {at(0.5)} | "
        f"{at(0.95)} | **{at(0.99)}** | {at(1)} | {f.opened_s:.1f} | {f.cpu:.0%} | "
        f"{f.rss_mb:.0f} | {1000 * (f.rss_mb - idle_rss_mb) / viewers:.0f} | {f.threads} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--viewers", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--delta-bytes", type=int, default=3000)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    n = options.viewers
    # All viewers of the bench are one session of one user.
    for name in ("ARCHIPELAGO_STREAMS_PER_SESSION", "ARCHIPELAGO_STREAMS_PER_USER"):
        os.environ[name] = str(max(n, 100))
    with tempfile.TemporaryDirectory() as folder, running_web(Path(folder)) as web:
        session, *runs = web.python(_PREPARE).split()
        server = psutil.Process(web.pid)
        # Once, so that what is loaded at the first request is in the idle figure.
        asyncio.run(measure(web, session, ["/stream"] * 5, runs[:1], 1, 100))
        idle = server.memory_info().rss / 1e6
        print(
            f"load average {os.getloadavg()[0]:.1f}; idle: {idle:.0f} MB, "
            f"{server.num_threads()} threads"
        )
        print(
            "| audience | viewers | deltas/s | received | p50, ms | p95 | p99 | max | opened in, s "
            "| web CPU | RSS, MB | KB a viewer | threads |\n" + "| --- |" + " ---: |" * 12
        )
        for name, paths, published in (
            ("one run", [f"/runs/{runs[0]}/stream"] * n, runs[:1]),
            (f"{RUNS} runs", [f"/runs/{runs[i % RUNS]}/stream" for i in range(n)], runs),
            ("the list", ["/stream"] * n, runs[:5]),
        ):
            found = asyncio.run(
                measure(web, session, paths, published, options.seconds, options.delta_bytes)
            )
            print(line(name, n, len(published), found, idle), flush=True)


if __name__ == "__main__":
    main()
