"""The Celery application. Tasks live in :mod:`runs.tasks`; beat's schedule is here."""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")

app = Celery("archipelago")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["runs"])
app.conf.beat_schedule = {
    # Messages expire, so that a worker that was away does not work off a pile of old ticks.
    "reconcile": {
        "task": "runs.tasks.reconcile_active",
        "schedule": 1.0,
        "options": {"expires": 5},
    },
    "reap": {"task": "runs.tasks.reap", "schedule": 60.0, "options": {"expires": 30}},
}
