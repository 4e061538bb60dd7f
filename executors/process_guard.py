"""Start a program that cannot outlive whoever started it.

``python -I tether.py PARENT_PID COMMAND...`` asks Linux to send SIGTERM to this process when its
parent dies (``prctl(PR_SET_PDEATHSIG)``, kept over ``execve``), then becomes COMMAND. So a
``kill -9`` of a supervisor leaves no server behind, and the command itself needs to know nothing.

Elsewhere than on Linux there is no such thing, and the command is simply started. The kernel
tells the death of the parent's *thread*: start tethered programs from a thread that lasts.

A script rather than a ``preexec_fn``, which is not safe in a process that has threads. It
imports nothing of ours, because it is run by path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, signum: int = signal.SIGTERM) -> None:
    """Have ``signum`` sent to this process when ``parent_pid`` dies; exit if it is dead already."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


def tethered(command: Sequence[str]) -> list[str]:
    """``command``, to be started by this very process, tethered to it."""
    return [sys.executable, "-I", str(Path(__file__).resolve()), str(os.getpid()), *command]


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(parent_pid)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
