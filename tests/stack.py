"""The whole server for end-to-end and browser tests: ``manage.py serve`` with its own state folder.

Nothing is simulated: a real broker, Celery workers, beat and uvicorn, started as an operator starts
them. The database begins as a copy of a migrated one. There are three users, one for each role, all
with :data:`PASSWORD`.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dashboard.server import broker
from tests.django_process import REPOSITORY, DjangoProcess
from tests.migrated import SQLITE, environment, migrated_database
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
        """Run ``code`` in another Django process on the same state; return what it prints."""
        return self.process.run(code)

    def output(self) -> str:
        """The supervisor's output."""
        return (self.var / "serve.log").read_text(errors="replace")

    def log(self, name: str) -> str:
        """The log of a service: broker, worker, beat or web."""
        path = self.var / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def stack_env(var: Path, *, migrated: bool = False) -> dict[str, str]:
    """The environment of a server with the state folder ``var`` and a new database.

    The database is empty, or with ``migrated`` the copy of a migrated one.
    """
    name = f"stack-{uuid.uuid4().hex}"
    template = migrated_database() if migrated else None
    url = stack_database(name, template=template)
    if template and url is None:
        var.mkdir(parents=True, exist_ok=True)
        shutil.copy(template, var / SQLITE)
    return environment(var, url)


@contextlib.contextmanager
def running_stack(var: Path, *, has_users: bool = True, **more_env: str) -> Iterator[LiveStack]:
    (port,) = free_ports(1)
    env = {**stack_env(var, migrated=True), **more_env}
    log = var / "serve.log"
    command = [sys.executable, "manage.py", "serve", "--port", str(port)]
    with child(command, log=log, env=env, cwd=REPOSITORY) as process:
        wait_until(
            lambda: log.exists() and "serving http" in log.read_text(),
            "the server did not start",
            timeout_s=1800,  # the server itself exits when one of its processes is stuck
            process=process,
            log=log,
        )
        env["REDIS_URL"] = broker.load(var / "broker").url
        with contextlib.closing(DjangoProcess(env)) as beside:
            stack = LiveStack(
                url=f"http://127.0.0.1:{port}/", var=var, env=env, pid=process.pid, process=beside
            )
            if has_users:
                stack.python(MAKE_USERS)
            yield stack
