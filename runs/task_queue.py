"""Enqueue Celery tasks by name after the transaction is committed.

A message that cannot be sent is logged and dropped, so a request never fails because Redis is
unavailable. Once the broker is back, the periodic reconciler finds the same work in the database
within seconds.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from celery import current_app
from django.db import transaction
from kombu.exceptions import OperationalError

logger = logging.getLogger(__name__)

_SEND_ONCE = {"max_retries": 1, "interval_start": 0.0, "interval_step": 0.1}


def enqueue(task: str, *args: Any, expires: float | None = None) -> None:
    """Send ``runs.tasks.<task>`` once the current transaction is committed."""
    transaction.on_commit(partial(_send, task, args, expires))


def _send(task: str, args: tuple[Any, ...], expires: float | None) -> None:
    try:
        current_app.send_task(
            f"runs.tasks.{task}", args=args, expires=expires, retry_policy=_SEND_ONCE
        )  # dashboard.celery selects the queue
    except OperationalError as error:
        logger.warning("%s%r was not sent, the reconciler will do it: %s", task, args, error)
