"""Stands for a replica: ``python -m replica_stub WHAT ARGS...``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def forever() -> None:
    while True:
        time.sleep(60)


def main() -> None:
    what, *args = sys.argv[1:]
    if what == "env":
        print(json.dumps(dict(os.environ)))
    elif what == "exit":
        print(*args[1:], sep="\n")
        sys.exit(int(args[0]))
    elif what == "kill":
        os.kill(os.getpid(), int(args[0]))
        forever()
    elif what == "wait":
        Path(args[0]).write_text(str(os.getpid()))
        forever()
    elif what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(args[0]).write_text(str(os.getpid()))
        forever()
    elif what == "polite":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        Path(args[0]).write_text(str(os.getpid()))
        forever()
    elif what == "child":
        inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(args[0]).write_text(str(inner.pid))
    elif what == "count":
        with Path(args[0]).open("a") as file:
            file.write("started\n")
        forever()
    elif what == "lines":
        print("first", flush=True)
        while not Path(args[0]).exists():
            time.sleep(0.01)
        print("second")
        print("no newline at the end", end="")


main()
