"""``python -I child.py PARENT_PID COMMAND...``: COMMAND, killed when PARENT_PID dies.

Asks Linux to kill this process with its parent (``prctl(PR_SET_PDEATHSIG)``, kept over
``execve``), then becomes COMMAND. Elsewhere the command is simply started. A script run by path, so
that nothing runs between fork and exec of a process that has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_FOUND = 127


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before we asked
            os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(NOT_FOUND)


if __name__ == "__main__":
    main()
