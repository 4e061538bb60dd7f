"""Run code of a test in another Django process, with the environment of a server.

Tests poll a server's database often and Django takes a second to start, so one process runs every
piece of code. Each piece has its own namespace, and its database connections are closed after it.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).resolve().parent.parent


class DjangoProcess:
    """Starts with the first :meth:`run`; :meth:`close` ends it."""

    def __init__(self, env: Mapping[str, str], code: Path = REPOSITORY) -> None:
        self._env = env
        self._code = code
        self._process: subprocess.Popen[str] | None = None

    def run(self, code: str) -> str:
        """Run ``code`` and return what it prints."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.django_process"],
                cwd=self._code,
                env=self._env,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait()}"
        printed, error = json.loads(line)
        assert error is None, error
        return str(printed).strip()

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def serve(requests: IO[str], results: IO[str]) -> None:
    """Run requests until the stream ends, which it does when the test process ends."""
    from django.db import connections

    for line in requests:
        printed, error = io.StringIO(), None
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(json.loads(line), "<test>", "exec"), {"__name__": "__test__"})
        except BaseException:
            error = traceback.format_exc()
        connections.close_all()
        results.write(json.dumps([printed.getvalue(), error]) + "\n")
        results.flush()


if __name__ == "__main__":
    import os

    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")
    results, sys.stdout = sys.stdout, sys.stderr
    django.setup()
    serve(sys.stdin, results)
