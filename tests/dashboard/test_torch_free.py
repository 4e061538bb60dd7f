"""Web server and worker run without torch, and do not import it if it is installed."""

from __future__ import annotations

import subprocess
import sys

from tests.stack import REPOSITORY

ENTRIES = (
    "import executors; executors.LocalProcessExecutor",
    "import dashboard.asgi",
    "import dashboard.celery, runs.tasks",
    "from django.core.management import call_command; call_command('check')",
    "import dashboard.urls, dashboard.server.supervisor, runs.submit.run_draft",
)
LOOK = "print([name for name in list(sys.modules) if name.split('.')[0] == 'torch'][:3])"


def test_torch_is_not_imported() -> None:
    code = "\n".join(["import sys", *(f"{entry}\n{LOOK}" for entry in ENTRIES)])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert dict(zip(ENTRIES, lines, strict=True)) == dict.fromkeys(ENTRIES, "[]")
