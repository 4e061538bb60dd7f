"""Classify failures of the server's own storage: disk full, database busy or unavailable.

SQLite: https://www.sqlite.org/rescode.html. PostgreSQL:
https://www.postgresql.org/docs/current/errcodes-appendix.html.
"""

from __future__ import annotations

import enum
import errno
import sqlite3

from django.db import DatabaseError, InterfaceError, OperationalError

_FULL_DISK = "53100"
_UNUSABLE = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})
_BUSY = frozenset({"40001", "40P01", "55P03"})
"""A serialization failure, a deadlock, and a lock timeout."""


class StorageTrouble(enum.StrEnum):
    """Kinds of failure. :mod:`dashboard.views.errors` describes the remedies on pages."""

    DISK_FULL = "disk full"
    BUSY = "database busy"
    AWAY = "database away"


def storage_trouble(error: BaseException | None) -> StorageTrouble | None:
    """Classify an exception or one of its causes; None if it does not concern storage."""
    for _ in range(10):  # longer than any chain of causes
        if error is None:
            return None
        trouble = None
        if isinstance(error, DatabaseError | InterfaceError):
            trouble = _database_trouble(error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            trouble = StorageTrouble.DISK_FULL
        if trouble is not None:
            return trouble
        error = error.__cause__
    return None


def _database_trouble(error: Exception) -> StorageTrouble | None:
    cause = error.__cause__
    code = getattr(cause, "sqlite_errorcode", None)
    if isinstance(code, int):
        primary = code & 0xFF
        if primary == sqlite3.SQLITE_FULL:
            return StorageTrouble.DISK_FULL
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StorageTrouble.BUSY
        return StorageTrouble.AWAY if primary in _UNUSABLE else None
    state = getattr(cause, "sqlstate", None)
    if state == _FULL_DISK:
        return StorageTrouble.DISK_FULL
    if state in _BUSY:
        return StorageTrouble.BUSY
    # A server that cannot be reached sends no code.
    lost = isinstance(error, OperationalError | InterfaceError) and cause is not None
    return StorageTrouble.AWAY if lost and not state else None
