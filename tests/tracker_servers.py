"""Servers of experiment trackers, in an environment with the packages of
``requirements/tracker-servers.txt``, which uv creates."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tracker_python() -> str:
    """An interpreter with the packages of the trackers. Immediate the second time."""
    folder = Path(sys.prefix) / "tracker-servers"
    uv = str(Path(sys.prefix) / "bin" / "uv")
    subprocess.run([uv, "venv", "--quiet", "--allow-existing", str(folder)], check=True)
    requirements = str(ROOT / "requirements" / "tracker-servers.txt")
    program = str(folder / "bin" / "python")
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--python", program, "-r", requirements], check=True
    )
    return program


@contextmanager
def running(command: Sequence[str], url: str, log: Path, **variables: str) -> Iterator[None]:
    """A server that answers at ``url``."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | variables, cwd=log.parent
        )
    try:
        while True:
            try:
                with urllib.request.urlopen(url, timeout=60):
                    break
            except OSError:
                assert process.poll() is None, log.read_text()
                time.sleep(0.2)  # between two attempts to connect
        yield
    finally:
        process.terminate()
        process.wait(60)
