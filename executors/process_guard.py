"""Start a program that ends with its parent process.

``python -I process_guard.py PARENT_PID COMMAND...`` sets ``prctl(PR_SET_PDEATHSIG, SIGTERM)``,
which survives ``execve``, and then executes COMMAND. ``kill -9`` of a supervisor therefore leaves
no server process running. The command needs no support for this.

Linux only; on other systems the command is started without the guard. The kernel sends the signal
when the parent *thread* ends, so the starting thread must live as long as the parent.

This is a script and not a ``preexec_fn``, which is unsafe in a process with threads. It is run by
path, so it imports only the standard library.
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
    """Request ``signum`` for the death of ``parent_pid``; exit if that process is gone already."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before prctl
        os._exit(1)


def tethered(command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` as a guarded child of this process."""
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
