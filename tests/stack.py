"""The whole server for end-to-end and browser tests: ``manage.py serve`` in a folder of its own.

Nothing is simulated: a real broker, Celery worker, beat and uvicorn on a file database, as a person
starts them. Three users are there, one per role, each with :data:`PASSWORD`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dashboard.server import broker
from tests.django_process import REPOSITORY, DjangoProcess
from tests.postgres import stack_database
from tests.servers import child, free_ports, wait_until

PASSWORD = "correct-horse-battery"
USERS = ("viewer", "operator", "admin")

MAKE_USERS = f"""
from django.contrib.auth.models import Group, User
for name in {USERS!r}:
    make = User.objects.create_superuser if name == "admin" else User.objects.create_user
    make(name, password={PASSWORD!r}).groups.add(Group.objects.get(name=name))
"""


@dataclass(frozen=True, kw_only=True)
class LiveStack:
    """A running server. ``url`` ends with a slash; ``pid`` is the supervisor's."""

    url: str
    var: Path
    env: dict[str, str]
    pid: int
    process: DjangoProcess

    def python(self, code: str) -> str:
        """What ``code`` prints in the server's own Django: another process on the same state."""
        return self.process.run(code)

    def said(self) -> str:
        """What the supervisor has printed."""
        return (self.var / "serve.log").read_text(errors="replace")

    def log(self, name: str) -> str:
        """What a service has logged: broker, worker, beat or web."""
        path = self.var / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def stack_env(var: Path) -> dict[str, str]:
    """This environment less what would lead the server to another database or broker."""
    dropped = ("REDIS_URL", "DATABASE_URL", "ARCHIPELAGO_RENDEZVOUS", "DJANGO_SETTINGS_MODULE")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    url = stack_database(f"stack-{uuid.uuid4().hex}")
    return {**kept, "ARCHIPELAGO_VAR": str(var), **({"DATABASE_URL": url} if url else {})}


@contextlib.contextmanager
def running_stack(var: Path, **more_env: str) -> Iterator[LiveStack]:
    (port,) = free_ports(1)
    env = {**stack_env(var), **more_env}
    log = var / "serve.log"
    command = [sys.executable, "manage.py", "serve", "--port", str(port)]
    with child(command, log=log, env=env, cwd=REPOSITORY) as process:
        wait_until(
            lambda: log.exists() and "serving http" in log.read_text(),
            "the server did not start",
            timeout_s=900,  # the server itself ends when a part of it is stuck
            process=process,
            log=log,
        )
        env["REDIS_URL"] = broker.load(var / "broker").url
        with contextlib.closing(DjangoProcess(env)) as beside:
            stack = LiveStack(
                url=f"http://127.0.0.1:{port}/", var=var, env=env, pid=process.pid, process=beside
            )
            stack.python(MAKE_USERS)
            yield stack
