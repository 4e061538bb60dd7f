"""Which of the server's own storage failed: a full disk, a busy database, or one that is away.

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
"""A serialization failure, a deadlock, and a lock that was not to be had in time."""


class StorageTrouble(enum.StrEnum):
    """What to do about it is in the pages' words: :mod:`dashboard.views.errors`."""

    DISK_FULL = "disk full"
    BUSY = "database busy"
    AWAY = "database away"


def storage_trouble(error: BaseException | None) -> StorageTrouble | None:
    """What an exception, or one that caused it, says about the server's storage; None when it is
    about something else."""
    for _ in range(10):  # a chain of causes ends sooner
        if error is None:
            return None
        found = _of_database(error) if isinstance(error, DatabaseError | InterfaceError) else None
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            found = StorageTrouble.DISK_FULL
        if found is not None:
            return found
        error = error.__cause__
    return None


def _of_database(error: Exception) -> StorageTrouble | None:
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
    # A server that cannot be reached has no code: the answer never came.
    lost = isinstance(error, OperationalError | InterfaceError) and cause is not None
    return StorageTrouble.AWAY if lost and not state else None
