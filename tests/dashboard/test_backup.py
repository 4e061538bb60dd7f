"""Backups with the commands of docs/operations.md, while another process writes: restored in a new
place and compared table by table."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import postgres
from tests.django_process import REPOSITORY, DjangoProcess
from tests.migrated import SQLITE, migrated_database
from tests.servers import child, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=1)]

MIGRATE = """
from django.core.management import call_command
call_command("migrate", verbosity=0, check_unapplied={check})
"""
FILL = """
from tests.browser import seed
seed.run(seed.user("olga", "operator"), committed=4)
"""
WRITE = """
import time
from django.contrib.auth.models import User
for n in range(100_000):
    User.objects.create(username=f"writer-{n}")
    print(n, flush=True)
    time.sleep(0.002)
"""
DIGESTS = """
import hashlib
from django.apps import apps
for model in sorted(apps.get_models(include_auto_created=True), key=lambda m: m._meta.label):
    rows = model.objects.order_by("pk")
    if model._meta.label == "auth.User":
        rows = rows.exclude(username__startswith="writer-")
    rows = [tuple(bytes(v) if isinstance(v, memoryview) else v for v in row)
            for row in rows.values_list()]
    print(model._meta.label, len(rows), hashlib.sha256(repr(rows).encode()).hexdigest())
"""


def command_of(beginning: str) -> str:
    """The only command in the documentation that starts with this text."""
    text = (REPOSITORY / "docs" / "operations.md").read_text()
    (result,) = re.findall(rf"^{re.escape(beginning)}.*$", text, re.MULTILINE)
    return str(result)


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    return {**kept, **more}


def filled(env: dict[str, str]) -> str:
    """Migrate the database and fill it; return the digests of its tables."""
    with contextlib.closing(DjangoProcess(env)) as django:
        django.run(MIGRATE.format(check=False))
        django.run(FILL)
        return django.run(DIGESTS)


@contextlib.contextmanager
def writing(env: dict[str, str], log: Path) -> Iterator[None]:
    """Run another process that writes."""
    command = [sys.executable, "manage.py", "shell", "--no-imports", "-c", WRITE]
    with child(command, log=log, env=env, cwd=REPOSITORY) as process:
        has_started = "\n20\n"
        wait_until(
            lambda: log.exists() and has_started in log.read_text(),
            "the first writes",
            process=process,
            log=log,
        )
        yield
        assert process.poll() is None, log.read_text()


def is_as_before(before: str, env: dict[str, str]) -> None:
    with contextlib.closing(DjangoProcess(env)) as django:
        django.run(MIGRATE.format(check=True))
        assert django.run(DIGESTS) == before
        writers = "from django.contrib.auth.models import User; print(User.objects.count())"
        assert int(django.run(writers)) >= 20, "what was written just before is in it"


def test_sqlite(tmp_path: Path) -> None:
    old, new = tmp_path / "var", tmp_path / "new"
    env = environment(ARCHIPELAGO_VAR=str(old))
    old.mkdir()
    shutil.copy(migrated_database(), old / SQLITE)
    before = filled(env)
    words = command_of('.venv/bin/python -c "import sqlite3')
    assert words.startswith(".venv/bin/python ")
    with writing(env, tmp_path / "log"):
        subprocess.run([sys.executable, *shlex.split(words)[1:]], cwd=tmp_path, env=env, check=True)
    new.mkdir()
    shutil.move(tmp_path / "backup.sqlite3", new / SQLITE)
    with contextlib.closing(sqlite3.connect(new / SQLITE)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    is_as_before(before, environment(ARCHIPELAGO_VAR=str(new)))


@pytest.fixture
def server() -> Iterator[postgres.PostgresServer]:
    binaries = postgres.postgres_binaries()
    assert binaries is not None
    # Every user can reach it, unlike pytest's own folder.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with postgres.running_postgres(Path(folder) / "postgres", binaries) as started:
            yield started


def test_postgresql(tmp_path: Path, server: postgres.PostgresServer) -> None:
    old, new = (server.create_database(name) for name in ("old", "new"))
    binaries = postgres.postgres_binaries()
    path = f"{binaries}:{os.environ['PATH']}"
    env = environment(ARCHIPELAGO_VAR=str(tmp_path / "var"), DATABASE_URL=old, PATH=path)
    before = filled(env)
    with writing(env, tmp_path / "log"):
        subprocess.run(command_of("pg_dump "), shell=True, cwd=tmp_path, env=env, check=True)
    env["DATABASE_URL"] = new
    subprocess.run(command_of("pg_restore "), shell=True, cwd=tmp_path, env=env, check=True)
    is_as_before(before, env)
