"""A migrated database, made once in a test session. The database of each worker process and of each
server under test begins as a copy: a migration of an empty database takes four seconds of CPU.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import postgres
from tests.django_process import REPOSITORY
from tests.session_folder import session_folder

SQLITE = "archipelago.sqlite3"
VARIABLE = "ARCHIPELAGO_TEST_MIGRATED"
"""The folder of a migrated database, for a session that a test starts."""
_POSTGRES = "migrated"

_shared: Path | None = None


def share(folder: Path) -> None:
    """Use the database in ``folder``, as the other worker processes of the session do."""
    global _shared
    _shared = folder


@functools.cache
def _folder() -> Path:
    folder = _shared
    if folder is None:
        folder = session_folder()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def exists() -> bool:
    return (_folder() / "done").exists()


def migrated_database() -> str:
    """The name of a migrated PostgreSQL database, or the path of a migrated SQLite file."""
    folder = _folder()
    file = folder / SQLITE
    on_postgres = postgres.session_address() is not None
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not exists():
            url = postgres.session_database(_POSTGRES) if on_postgres else None
            _migrate(environment(folder, url))
            if not on_postgres:
                _leave_wal(file)
            (folder / "done").touch()
    return _POSTGRES if on_postgres else str(file)


def _migrate(env: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
        cwd=REPOSITORY,
        env=env,
        check=True,
    )


def _leave_wal(file: Path) -> None:
    """A database in memory has no write-ahead log."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")


def environment(var: Path, database_url: str | None) -> dict[str, str]:
    """This environment without the variables that lead to another database or broker."""
    dropped = ("REDIS_URL", "DATABASE_URL", "ARCHIPELAGO_RENDEZVOUS", "DJANGO_SETTINGS_MODULE")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    database = {"DATABASE_URL": database_url} if database_url else {}
    return {**kept, "ARCHIPELAGO_VAR": str(var), **database}


@contextlib.contextmanager
def copied_for_tests(connection: Any) -> Iterator[None]:
    """Let pytest-django's database begin as a copy, before Django creates it."""
    migrated = migrated_database()
    if connection.vendor == "postgresql":
        connection.settings_dict["TEST"]["TEMPLATE"] = migrated
        yield
        return
    # The database in memory exists while a connection is open.
    name = connection.creation._get_test_db_name()
    with contextlib.closing(sqlite3.connect(name, uri=True)) as memory:
        with contextlib.closing(sqlite3.connect(migrated)) as source:
            source.backup(memory)
        yield
