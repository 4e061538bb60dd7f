"""Real servers for tests, out of wheels, each on a free loopback port and ended with the test."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from dashboard import broker
from executors.tether import tethered


@contextlib.contextmanager
def child(
    command: list[str], *, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, and with this process if that is killed."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            tethered(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            process_group=0,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(
    ready: Callable[[], bool],
    what: str,
    *,
    timeout_s: float = 60,
    process: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
) -> None:
    """Poll ``ready`` until it is true; fail with what ``process`` said if it ended first."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline:
            said = log.read_text(errors="replace")[-3000:] if log and log.exists() else ""
            raise AssertionError(f"{what}: {'ended' if ended else 'timed out'}\n{said}")
        time.sleep(0.02)


@contextlib.contextmanager
def running_valkey(folder: Path) -> Iterator[str]:
    """URL of a Valkey server that keeps its files in ``folder``."""
    server = broker.prepare(folder)
    log = folder / "log"
    with child(server.command, log=log) as process:
        wait_until(server.ready, "valkey did not start", process=process, log=log)
        yield server.url
