"""The process that stands between :mod:`executors.local` and one replica.

    launcher --lock--> shim (own session) --> replica (own process group)

The shim holds the job's lock for as long as it lives; that is what "running" means to everybody
else. It writes ``handle.json`` as its first act, starts the replica, ends it when asked by SIGTERM
(SIGTERM to the replica's group, SIGKILL after the grace), and writes ``exit.json`` as its last.

It is run by path in isolated mode and imports nothing of ours, so that it neither depends on the
code bundle of the run nor on the state of the caller. A single thread: ``preexec_fn`` is safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1
_ON_LINUX = sys.platform.startswith("linux")
_ASKED_BY = {signal.SIGTERM, signal.SIGINT, signal.SIGALRM}


def boot_id() -> str:
    """Names this boot of the machine: process ids and start times mean nothing in another."""
    path = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return str(int(psutil.boot_time()))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write all of it or nothing."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_text(json.dumps(value))
    made.replace(path)


class Shim:
    """One replica's life, from the lock to ``exit.json``."""

    def __init__(self, folder: Path, grace_s: float) -> None:
        self.folder = folder
        self.grace_s = grace_s
        self.cancelled = False
        self.group: int | None = None
        self.libc = ctypes.CDLL(None) if _ON_LINUX else None

    def run(self, command: list[str]) -> None:
        signal.signal(signal.SIGTERM, self.on_cancel)
        signal.signal(signal.SIGINT, self.on_cancel)
        signal.signal(signal.SIGALRM, self.on_grace_over)
        me = psutil.Process()
        write_json(
            self.folder / "handle.json",
            {
                "pid": me.pid,
                "created_s": me.create_time(),
                "boot_id": boot_id(),
                "started_wall_s": time.time(),
            },
        )
        # Looked for only now: a canceller leaves this file first and then looks for handle.json,
        # so one of the two sees the other.
        if (self.folder / "cancel").exists():
            self.cancelled = True
        if self.cancelled:
            self.write_end(exit_code=None, message="cancelled before it was started")
            return
        try:
            exit_code = self.wait(self.start(command))
        except OSError as error:
            self.write_end(
                exit_code=None, message=f"could not start {command[0]}: {error.strerror}"
            )
            return
        self.write_end(exit_code=exit_code)

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        shim_pid = os.getpid()

        def in_child() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            if self.libc is not None:
                # A shim that is killed takes the replica with it: nobody would see how it ends.
                self.libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                if os.getppid() != shim_pid:
                    os._exit(1)

        with _blocked(), (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=in_child,
            )
            self.group = process.pid
            if self.cancelled:  # asked before there was a group to end
                self.end_group()
        return process

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        if _ON_LINUX:
            # Not reaped yet, so that its number cannot be given to a stranger.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
        with _blocked():
            self.signal_group(signal.SIGKILL)  # what the replica left behind in its group
            self.group = None
            return process.wait()

    def on_cancel(self, signum: int, frame: FrameType | None) -> None:
        if not self.cancelled:
            self.cancelled = True
            self.end_group()

    def end_group(self) -> None:
        if self.group is not None:
            signal.setitimer(signal.ITIMER_REAL, max(self.grace_s, 1e-3))
            self.signal_group(signal.SIGTERM)

    def on_grace_over(self, signum: int, frame: FrameType | None) -> None:
        self.signal_group(signal.SIGKILL)

    def signal_group(self, signum: signal.Signals) -> None:
        if self.group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, signum)

    def write_end(self, *, exit_code: int | None, message: str = "") -> None:
        write_json(
            self.folder / "exit.json",
            {
                "exit_code": exit_code,
                "cancelled": self.cancelled,
                "ended_wall_s": time.time(),
                "message": message,
            },
        )


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Requests to end wait until the block is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED_BY)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main() -> None:
    """``local_shim.py LOCK_FD GRACE_S FOLDER COMMAND...``"""
    lock_fd, grace_s, folder = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    os.set_inheritable(lock_fd, False)  # the replica must not hold the lock
    if os.fork():
        # Nobody's child: the launcher is left no zombie and may end at any time.
        os._exit(0)
    Shim(folder, grace_s).run(sys.argv[4:])


if __name__ == "__main__":
    main()
