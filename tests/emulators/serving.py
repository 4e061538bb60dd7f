"""Servers as children of this process, each on free loopback ports and ended with its block."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.emulators import child as tie


@contextlib.contextmanager
def child(
    command: list[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ends_by: signal.Signals = signal.SIGTERM,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, and with this process if that is killed."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", tie.__file__, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            process_group=0,
        )
    try:
        yield process
    finally:
        process.send_signal(ends_by)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(
    ready: Callable[[], object],
    what: str,
    *,
    timeout_s: float = 300,
    every_s: float = 0.02,
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
        time.sleep(every_s)


def free_ports(count: int) -> list[int]:
    """Loopback ports nobody listens on now, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False
