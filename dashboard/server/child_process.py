"""A child process of the supervisor: start it, watch it, and end it with its process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from executors.process_guard import tethered

LOG_LIMIT_BYTES = 20_000_000


@dataclass
class Child:
    """A command in its own process group that logs to a file. It ends with this process."""

    name: str
    command: list[str]
    log: Path
    env: Mapping[str, str]
    cwd: Path
    restarts: list[float] = field(default_factory=list)
    """Times of its restarts, on the monotonic clock."""
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > LOG_LIMIT_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        command = (
            [sys.executable, *self.command[1:]] if self.command[0] == "python" else self.command
        )
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                tethered(command),
                cwd=self.cwd,
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal only reaches the supervisor, which stops children in order.
                process_group=0,
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def ended(self) -> int | None:
        """The exit code, once it has ended and its process group was killed; otherwise None."""
        if self._process is None:
            return None
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._process.poll()
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self._process.returncode is None and os.waitid(os.P_PID, self._process.pid, options):
            # Before it is reaped: afterwards its pid can belong to another process.
            self._signal_group(signal.SIGKILL)
            self._process.wait()
        return self._process.returncode

    def terminate(self) -> None:
        """Send SIGTERM to the child only."""
        if self._process is not None and self.ended() is None:
            # Not Popen.terminate, which reaps it if it has ended meanwhile: ended() then cannot
            # kill its group.
            os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the child and its process group."""
        if self._process is not None and self.ended() is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the child to end. Returns whether it did within the time."""
        deadline = time.monotonic() + timeout_s
        while self._process is not None and self.ended() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def activity(self) -> tuple[float, int]:
        """Values that change while the child makes progress: CPU seconds of it and its
        descendants, and the size of its log in bytes."""
        seconds = 0.0
        if self._process is not None:
            with contextlib.suppress(psutil.Error):
                own = psutil.Process(self._process.pid)
                for process in (own, *own.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        times = process.cpu_times()
                        seconds += times.user + times.system
        size = self.log.stat().st_size if self.log.exists() else 0
        return round(seconds, 1), size

    def log_tail(self, lines: int = 5) -> str:
        """The last lines of its log."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            text = file.read().decode(errors="replace").strip()
            return "\n".join(text.splitlines()[-lines:])
        return ""

    def _signal_group(self, signum: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)
