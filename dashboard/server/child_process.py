"""One child process of the supervisor: started, watched, ended with all it started itself."""

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
    """A command in a process group of its own, logging to a file; tethered to this process."""

    name: str
    command: list[str]
    log: Path
    env: Mapping[str, str]
    cwd: Path
    restarts: list[float] = field(default_factory=list)
    """When it was started again, on the monotonic clock."""
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
                # Ctrl-C in the terminal reaches the supervisor alone, which stops them in order.
                process_group=0,
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def ended(self) -> int | None:
        """Its exit code once it has ended, and then nothing it started lives any more."""
        if self._process is None:
            return None
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._process.poll()
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self._process.returncode is None and os.waitid(os.P_PID, self._process.pid, options):
            # Before it is reaped: its number cannot have been given to a stranger yet.
            self._signal_group(signal.SIGKILL)
            self._process.wait()
        return self._process.returncode

    def terminate(self) -> None:
        """Ask it, and it alone, to end."""
        if self._process is not None and self.ended() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End it and everything in its group now."""
        if self._process is not None and self.ended() is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time."""
        deadline = time.monotonic() + timeout_s
        while self._process is not None and self.ended() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def activity(self) -> tuple[float, int]:
        """Figures that change while the child makes progress: processor seconds of it and of the
        processes that it started, and bytes of its log."""
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

    def last_words(self, lines: int = 5) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            text = file.read().decode(errors="replace").strip()
            return "\n".join(text.splitlines()[-lines:])
        return ""

    def _signal_group(self, signum: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)
