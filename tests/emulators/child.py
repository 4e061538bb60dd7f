"""``python -I child.py PARENT_PID COMMAND...``: COMMAND, killed when PARENT_PID dies.

Sets ``prctl(PR_SET_PDEATHSIG, SIGKILL)``, which survives ``execve``, and executes COMMAND. Linux
only; on other systems the command is started without it. A script that is run by path, because no
code can run safely between fork and exec in a process with threads.
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
        if os.getppid() != parent_pid:  # it died before prctl
            os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(NOT_FOUND)


if __name__ == "__main__":
    main()
