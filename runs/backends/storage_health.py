"""Detect that the server cannot write its own storage, for ``/readyz`` and the page banners.

Every process sees a full disk. A database whose writes fail looks healthy to a page, which only
reads. The control worker therefore writes to it every second (:func:`probe_database`) and reports a
failure in Redis.
"""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from typing import Any

import redis
from django.conf import settings
from django.db import DatabaseError, connection, transaction
from django.utils import timezone

from runs import live_stream
from runs.disk import disk_state
from runs.models import Event
from runs.storage_errors import StorageTrouble, storage_trouble

DATABASE = "archipelago:database"
PATIENCE_S = 5.0
"""Longer than any write of another process."""
KEPT_S = 60
"""Lifetime of a report that is not repeated, because its worker has ended."""
_REASONS = {
    StorageTrouble.BUSY: "another process holds its write lock",
    StorageTrouble.DISK_FULL: "its disk is full",
    StorageTrouble.AWAY: "it can't be reached",
}


def probe_database() -> None:
    """Write to the database without changing anything, and report a failure in Redis."""
    try:
        with _patience(PATIENCE_S), transaction.atomic():
            Event.objects.filter(pk=0).update(level=Event.Level.INFO)
    except DatabaseError as error:
        trouble = storage_trouble(error)
        _note(_REASONS[trouble] if trouble else type(error).__name__)
        return
    with contextlib.suppress(redis.RedisError, OSError):
        live_stream.client().delete(DATABASE)


@contextlib.contextmanager
def _patience(seconds: float) -> Any:
    """Shorten the time that SQLite waits for its write lock."""
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        yield
        return
    usual_s = connection.settings_dict["OPTIONS"].get("timeout", PATIENCE_S)
    with connection.cursor() as cursor:
        cursor.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
    try:
        yield
    finally:
        with contextlib.suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute(f"PRAGMA busy_timeout = {int(usual_s * 1000)}")


def _note(reason: str) -> None:
    with contextlib.suppress(redis.RedisError, OSError):
        before = _noted(live_stream.client().get(DATABASE))
        since = before["since"] if before else timezone.now().timestamp()
        note = json.dumps({"since": since, "reason": reason})
        live_stream.client().set(DATABASE, note, ex=KEPT_S)


def _noted(stored: Any) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        note = json.loads(stored) if stored is not None else None
        if isinstance(note, dict) and {"since", "reason"} <= set(note):
            return note
    return None


def database_problem() -> str:
    """Why and since when the database can't be written; '' while it can."""
    try:
        note = _noted(live_stream.ask(lambda client: client.get(DATABASE)))
    except (redis.RedisError, OSError):
        return ""
    if note is None:
        return ""
    since = datetime.fromtimestamp(float(note["since"]), UTC)
    return f"can't be written since {since:%H:%M:%S} UTC: {note['reason']}"


def storage_problem() -> str:
    """A sentence for the pages; '' while disk and database can be written."""
    disk = disk_state(settings.VAR_DIR)
    if disk != "ok":
        return f"The server's disk is {disk}."
    problem = database_problem()
    return f"The database {problem}." if problem else ""
