"""The web server of a measurement: one uvicorn process, its broker, a database, users and runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dashboard.server import broker, commands
from tests.emulators.serving import accepts, child, free_ports, wait_until

REPOSITORY = Path(__file__).resolve().parent.parent.parent

SIGN_IN = """
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import Group, User
from django.contrib.sessions.backends.db import SessionStore

def sign_in(name="bench"):
    user, _ = User.objects.get_or_create(username=name)
    user.groups.add(Group.objects.get(name="operator"))
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.create()
    return user, session.session_key
"""


@dataclass(frozen=True, kw_only=True)
class Web:
    port: int
    pid: int
    redis_url: str
    env: dict[str, str]

    def python(self, code: str) -> str:
        """Run ``code`` in the server's Django and return its output."""
        return run_python(code, self.env)


def run_python(code: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "manage.py", "shell", "--no-imports", "-c", code],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.strip()


@contextlib.contextmanager
def running_web(var: Path, *, database_url: str = "") -> Iterator[Web]:
    """State in ``var``; SQLite there unless ``database_url`` names another."""
    env = {k: v for k, v in os.environ.items() if k not in ("DATABASE_URL", "REDIS_URL")}
    env |= {"ARCHIPELAGO_VAR": str(var), "PYTHONPATH": str(REPOSITORY)}
    env["ARCHIPELAGO_OPERATORS_LOCAL"] = "backend"
    if database_url:
        env["DATABASE_URL"] = database_url
    server = broker.prepare(var / "broker")
    log = var / "broker.log"
    with child(server.command, log=log) as process:
        wait_until(server.ready, "the broker did not start", process=process, log=log)
        env["REDIS_URL"] = server.url
        subprocess.run(
            [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
            cwd=REPOSITORY,
            env=env,
            check=True,
        )
        (port,) = free_ports(1)
        command = [sys.executable, *commands.web(host="127.0.0.1", port=port)[1:]]
        log = var / "web.log"
        with child(command, log=log, env=env, cwd=REPOSITORY) as process:
            wait_until(
                lambda: accepts(port), "the web server did not start", process=process, log=log
            )
            yield Web(port=port, pid=process.pid, redis_url=server.url, env=env)
