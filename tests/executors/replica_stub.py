"""A replica for tests: ``python -m replica_stub WHAT ARGS...``. It imports only the standard
library, so it runs wherever an executor starts it."""

from __future__ import annotations

import hashlib
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


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


def main() -> None:
    what, *args = sys.argv[1:]
    if what == "env":
        print(json.dumps(dict(os.environ)))
    elif what == "args":
        print(json.dumps(args))
    elif what == "digests":
        for name in args:
            print(hashlib.sha256(os.environ[name].encode()).hexdigest())
        print(json.dumps([sys.orig_argv, sys.argv]))
    elif what == "exit":
        print(*args[1:], sep="\n", flush=True)
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
    elif (
        what == "deaf-sessions"
    ):  # a replica and ranks in their own sessions, which all ignore SIGTERM
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ranks = [
            subprocess.Popen([sys.executable, __file__, "deaf", path], start_new_session=True)
            for path in args[1:]
        ]
        Path(args[0]).write_text(str(os.getpid()))
        ranks[0].wait()
    elif what == "leave-session":  # exits, and leaves a child running
        subprocess.Popen([sys.executable, __file__, "deaf", args[0]], start_new_session=True)
        wait_for(args[0])
    elif what == "count":
        with Path(args[0]).open("a") as file:
            file.write("started\n")
        forever()
    elif what == "lines":
        print("first", flush=True)
        wait_for(args[0])
        print("second")
        print("no newline at the end", end="")
    elif what == "hog-child":
        subprocess.run([sys.executable, __file__, "hog", *args])
    elif what == "hog":
        Path(args[0]).write_text(str(os.getpid()))
        held = [b"x" * (1 << 20) for _ in range(int(args[1]))]
        print(len(held))
        forever()


main()
