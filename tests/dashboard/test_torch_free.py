"""Web server and worker run without torch, and do not import it if it is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.stack import REPOSITORY


@pytest.mark.parametrize(
    "code",
    [
        "import dashboard.asgi",
        "import dashboard.celery, runs.tasks",
        "import django; django.setup(); from django.core.management import call_command; "
        "call_command('check')",
        "import django; django.setup(); import dashboard.urls, dashboard.server.supervisor, "
        "runs.submit.run_draft",
        "import executors; executors.LocalProcessExecutor",
    ],
)
def test_torch_is_not_imported(code: str) -> None:
    setup = "import django; django.setup(); " if "runs.tasks" in code else ""
    look = "import sys; print([m for m in sys.modules if m.split('.')[0] == 'torch'][:3])"
    done = subprocess.run(
        [sys.executable, "-c", f"{setup}{code}\n{look}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
