"""Web server and worker run without torch, and do not import it if it is installed. Workers do not
import the pages and the API either, and beat does not import the tasks."""

from __future__ import annotations

import subprocess
import sys

from tests.stack import REPOSITORY

BEAT = "from dashboard.celery import app; app.Beat(quiet=True).init_loader()"
WORKER = "from dashboard.celery import app; app.loader.import_default_modules(); import runs.tasks"
ENTRIES = (
    WORKER,
    "import executors; executors.LocalProcessExecutor",
    "import dashboard.asgi",
    "from django.core.management import call_command; call_command('check')",
    "import dashboard.urls, dashboard.server.supervisor, runs.submit.run_draft",
)
LOOK = "print([name for name in list(sys.modules) if name.split('.')[0] == 'torch'][:3])"
LOOK_FOR_TASKS = "print([n for n in sys.modules if n.startswith(('runs.tasks', 'runs.admin'))])"
LOOK_FOR_PAGES = "print([name for name in ('ninja', 'dashboard.urls') if name in sys.modules])"


def test_torch_is_not_imported_nor_are_tasks_by_beat_or_pages_by_a_worker() -> None:
    parts = ["import sys", BEAT, LOOK_FOR_TASKS, WORKER, LOOK_FOR_PAGES]
    parts += [f"{entry}\n{LOOK}" for entry in ENTRIES]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(parts)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    tasks, pages, *torch = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert tasks == pages == "[]"
    assert dict(zip(ENTRIES, torch, strict=True)) == dict.fromkeys(ENTRIES, "[]")
