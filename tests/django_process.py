"""Another process with the server's Django, which runs what a test sends it.

It is started once and asked many times, for starting it takes a second: tests that wait for
something in the database of a server ask often. Each piece of code has a namespace of its own, and
connections to the database end with it.
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
    """Started with the first question; :meth:`close` ends it."""

    def __init__(self, env: Mapping[str, str], code: Path = REPOSITORY) -> None:
        self._env = env
        self._code = code
        self._process: subprocess.Popen[str] | None = None

    def run(self, code: str) -> str:
        """What ``code`` prints."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.django_process"],
                cwd=self._code, env=self._env, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
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


def serve(questions: IO[str], answers: IO[str]) -> None:
    """Until the end of ``questions``, which is also that of whoever asks."""
    from django.db import connections

    for line in questions:
        printed, error = io.StringIO(), None
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(json.loads(line), "<test>", "exec"), {"__name__": "__test__"})
        except BaseException:
            error = traceback.format_exc()
        connections.close_all()
        answers.write(json.dumps([printed.getvalue(), error]) + "\n")
        answers.flush()


if __name__ == "__main__":
    import os

    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")
    answers, sys.stdout = sys.stdout, sys.stderr
    django.setup()
    serve(sys.stdin, answers)
