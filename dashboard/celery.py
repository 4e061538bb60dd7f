"""The Celery application. Tasks live in :mod:`runs.tasks`; beat's schedule is here."""

from __future__ import annotations

import logging
import os
import resource
from typing import Any

from celery import Celery
from celery.signals import (
    after_setup_logger,
    after_setup_task_logger,
    beat_init,
    worker_init,
    worker_process_init,
)

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")

app = Celery("archipelago")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["runs"])
# Three workers (dashboard.server.commands): what controls runs waits for nothing else.
CONTROL, INGEST, DEFAULT = "control", "ingest", "celery"
app.conf.task_default_queue = DEFAULT
app.conf.task_routes = {
    "runs.tasks.reconcile_active": {"queue": CONTROL},
    "runs.tasks.reconcile_run": {"queue": CONTROL},
    "runs.tasks.ingest_active": {"queue": INGEST},
    "runs.tasks.ingest_run": {"queue": INGEST},
    "runs.tasks.write_bucket": {"queue": INGEST},
}
app.conf.beat_schedule = {
    # Messages expire, so that a worker that was away does not work off a pile of old ticks.
    "reconcile": {
        "task": "runs.tasks.reconcile_active",
        "schedule": 1.0,
        "options": {"expires": 5},
    },
    "ingest": {
        "task": "runs.tasks.ingest_active",
        "schedule": 1.0,
        "options": {"expires": 5},
    },
    "launch": {
        "task": "runs.tasks.beat_launch",
        "schedule": 5.0,
        "options": {"expires": 5},
    },
    "webhooks": {
        "task": "runs.tasks.webhooks_due",
        "schedule": 10.0,
        "options": {"expires": 10},
    },
    "uploads": {
        "task": "runs.tasks.forget_uploads",
        "schedule": 3600.0,
        "options": {"expires": 600},
    },
    "reap": {"task": "runs.tasks.reap", "schedule": 60.0, "options": {"expires": 30}},
}


@worker_process_init.connect
def _limit_memory(**_: Any) -> None:
    """A process that reads records has a bound, so that a record which needs more memory fails
    with MemoryError in its own process. Only the ingest worker sets the variable."""
    limit_mb = int(os.environ.get("ARCHIPELAGO_PROCESS_MB", "0"))
    if limit_mb:
        limit = limit_mb * 1024 * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


@after_setup_logger.connect
@after_setup_task_logger.connect
def _dress(logger: logging.Logger, **_: Any) -> None:
    """A worker brings handlers of its own."""
    from django.conf import settings

    from dashboard.logging import dress

    dress(logger, settings.LOG_FORMAT)


@worker_init.connect
@beat_init.connect
def _check(**_: Any) -> None:
    from dashboard.checks import at_start
    from dashboard.security.private_files import set_umask

    set_umask()
    at_start()
    _check_schema()


def _check_schema() -> None:
    """Workers and beat of two versions never work on one database: see docs/operations.md."""
    from runs.schema import NewerSchema, wait_for_schema

    try:
        wait_for_schema()
    except NewerSchema as error:
        raise SystemExit(f"archipelago: {error}") from None


@worker_process_init.connect
def _load(**_: Any) -> None:
    """In each process after the fork, because a thread that imports must not be alive at a fork;
    only what is in use, because each process pays for it in memory."""
    from executors.loading import warm_up
    from runs.backends.executors import backends_in_use

    warm_up(backends_in_use())
