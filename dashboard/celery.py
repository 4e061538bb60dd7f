"""The Celery application and the schedule of beat. The tasks are in :mod:`runs.tasks`."""

from __future__ import annotations

import logging
import os
import resource
from functools import cached_property
from typing import Any

from celery import Celery
from celery.signals import (
    after_setup_logger,
    after_setup_task_logger,
    beat_init,
    task_prerun,
    worker_init,
    worker_process_init,
)

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")
# Celery runs Django's checks and ignores their result. They import every page and the API, which
# workers and beat do not need; at_start() below runs the checks of the settings.
os.environ.setdefault("CELERY_SKIP_CHECKS", "true")


class App(Celery):  # type: ignore[misc]
    @cached_property
    def Beat(self) -> Any:
        return self.subclass_with_self("dashboard.server.scheduler:Beat")


app = App("archipelago")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["runs"])
# Three workers (dashboard.server.commands), so that run control never waits for other tasks.
CONTROL, INGEST, DEFAULT = "control", "ingest", "celery"
app.conf.task_default_queue = DEFAULT
app.conf.task_routes = {
    "runs.tasks.reconcile_active": {"queue": CONTROL},
    "runs.tasks.reconcile_run": {"queue": CONTROL},
    "runs.tasks.control_sweep": {"queue": CONTROL},
    "runs.tasks.evaluate_budgets": {"queue": CONTROL},
    "runs.tasks.ingest_active": {"queue": INGEST},
    "runs.tasks.ingest_run": {"queue": INGEST},
    "runs.tasks.write_bucket": {"queue": INGEST},
}
# Entry: its task, the interval, and the age at which a message expires, both in seconds, so that a
# worker that was down does not process a backlog of old ticks.
_SCHEDULE: dict[str, tuple[str, float, int]] = {
    "reconcile": ("reconcile_active", 1.0, 5),
    "ingest": ("ingest_active", 1.0, 5),
    "launch": ("beat_launch", 5.0, 5),
    "webhooks": ("webhooks_due", 10.0, 10),
    "mirrors": ("mirrors_due", 5.0, 5),
    "evaluations": ("evaluations_due", 5.0, 5),
    "uploads": ("forget_uploads", 3600.0, 600),
    "reap": ("reap", 60.0, 30),
    "budgets": ("evaluate_budgets", 20.0, 20),
}
app.conf.beat_schedule = {
    name: {"task": f"runs.tasks.{task}", "schedule": every_s, "options": {"expires": expires_s}}
    for name, (task, every_s, expires_s) in _SCHEDULE.items()
}


@worker_process_init.connect
def _limit_memory(**_: Any) -> None:
    """Limit the memory of a process that reads records: a record that needs more fails with
    MemoryError in its own process. Only the ingest worker sets the variable."""
    limit_mb = int(os.environ.get("ARCHIPELAGO_PROCESS_MB", "0"))
    if limit_mb:
        limit = limit_mb * 1024 * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


@after_setup_logger.connect
@after_setup_task_logger.connect
def _configure_logging(logger: logging.Logger, **_: Any) -> None:
    """Replace the format of the handlers that a worker installs."""
    from django.conf import settings

    from dashboard.logging import configure_handlers

    configure_handlers(logger, settings.LOG_FORMAT)


@task_prerun.connect
def _refresh_prices(**_: Any) -> None:
    """Read the prices that administrators set, if this process's copy is old."""
    from runs.backends import price_settings

    price_settings.refresh()


@worker_init.connect
@beat_init.connect
def _check(**_: Any) -> None:
    from dashboard.checks import at_start
    from dashboard.security.private_files import set_umask

    set_umask()
    at_start()
    _check_schema()


def _check_schema() -> None:
    """Prevent workers and beat of two versions on one database: see docs/operations.md."""
    from runs.schema import IncompatibleSchema, wait_for_schema

    try:
        wait_for_schema()
    except IncompatibleSchema as error:
        raise SystemExit(f"archipelago: {error}") from None


@worker_process_init.connect
def _load(**_: Any) -> None:
    """Import client libraries of backends in each process after the fork, because no importing
    thread may be alive during a fork; only those in use, because each process pays in memory."""
    from executors.loading import warm_up
    from runs.backends.executors import backends_in_use

    warm_up(backends_in_use())
