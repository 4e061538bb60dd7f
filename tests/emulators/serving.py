"""Run servers as child processes on free loopback ports; each ends with its block."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.emulators import child as guard


@contextlib.contextmanager
def child(
    command: list[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ends_by: signal.Signals = signal.SIGTERM,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, or with this process if it is killed."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(os.getpid()), *command],
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
    timeout_s: float = 900,
    every_s: float = 0.02,
    process: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
) -> None:
    """Poll ``ready`` until it is true; fail with the log of ``process`` if it ended first."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline:
            output = log.read_text(errors="replace")[-3000:] if log and log.exists() else ""
            raise AssertionError(f"{what}: {'ended' if ended else 'timed out'}\n{output}")
        time.sleep(every_s)


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that no process listens on.

    They are below the ports that Linux and macOS give to outgoing connections, so no client takes
    one of them before the server starts.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(range(10_240, 32_768), k=1_000):
            if len(found) == count:
                break
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
    if len(found) < count:
        raise AssertionError(f"expected {count} free ports, found {len(found)}")
    return found


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False
