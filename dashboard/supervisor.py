"""Everything the server needs, started and stopped as one: broker, worker, ticker, web.

::

    manage.py serve --- valkey-server   (unless REDIS_URL names another broker)
                    |-- celery worker (control)
                    |-- celery worker (ingest)
                    |-- celery worker (everything else)
                    |-- celery beat
                    `-- uvicorn

For one machine; ``docker-compose.yml`` runs the same commands as services. State and logs are in
the state folder, one supervisor each (a lock sees to it). A child that dies is started again, and
one that keeps dying ends the whole with its last words. SIGINT, SIGTERM or SIGHUP stop every child
and every local replica; a second one kills them. When the supervisor itself is killed, Linux ends
its children (:mod:`executors.tether`); local replicas go on and are found again at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TextIO

from django.conf import settings
from django.core.management import call_command
from django.db import DatabaseError

from dashboard import broker, commands
from dashboard.celery import app as celery_app
from dashboard.children import Child
from executors import LocalProcessExecutor
from executors.base import ExecutorConfig

FREE_BYTES = 200_000_000
START_S = 60.0
STOP_S = 10.0
TICK_S = 0.2
RESTARTS, WITHIN_S = 5, 60.0
"""A child that dies more often than this is not started again."""


class SupervisorError(Exception):
    """It cannot start or go on; the message says why."""


class Stopped(Exception):
    """Somebody asked for the end while something was being started."""


class Supervisor:
    """Use it as a context manager: leaving the block stops everything."""

    def __init__(self, *, host: str, port: int, say: Callable[[str], None]) -> None:
        self.host = host
        self.port = port
        self.say = say
        self.var: Path = settings.VAR_DIR
        self.children: list[Child] = []
        self.stopping = False
        self._lock: TextIO | None = None
        self._impatient = False

    @property
    def address(self) -> str:
        host = self._reachable_host
        return f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"

    @property
    def _reachable_host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104

    def __enter__(self) -> Supervisor:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything in order; returns when pages are answered."""
        check_state_folder(self.var)
        self._take_lock()
        if not broker.port_is_free(self.port, self.host):
            raise SupervisorError(
                f"port {self.port} on {self.host} is in use; set ARCHIPELAGO_PORT to another"
            )
        try:
            if os.environ.get("REDIS_URL"):
                broker.check(settings.REDIS_URL)
            else:
                self._start_broker()
        except broker.BrokerError as error:
            raise SupervisorError(str(error)) from error
        try:
            call_command("migrate", verbosity=0, interactive=False)
        except DatabaseError as error:
            raise SupervisorError(f"the database cannot be used: {error}") from error
        self._start("control", commands.control())
        self._start("ingest", commands.ingest(), ARCHIPELAGO_PROCESS_MB=str(commands.INGEST_MB))
        self._start("worker", commands.worker())
        self._start("beat", commands.beat())
        self._start("web", commands.web(host=self.host, port=self.port))
        self._wait_until(self._answers, "the web server to answer")

    def check(self) -> None:
        """Start again what died; raises :class:`SupervisorError` when that does not help."""
        for child in self.children:
            code = child.ended()
            if code is not None and not self.stopping:
                self._revive(child, code)

    def wait(self, seconds: float = TICK_S) -> None:
        """Look after the children for a while, or until asked to stop."""
        deadline = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < deadline:
            self.check()
            time.sleep(min(TICK_S, seconds))

    def stop(self) -> None:
        """Stop every child and local replica; in the end none is left."""
        self.stopping = True
        if self._lock is None:
            return
        by_name = {child.name: child for child in self.children}
        server = by_name.pop("broker", None)
        # The worker first: it would take a replica that we end for one that was lost.
        self._end(list(by_name.values()))
        local = LocalProcessExecutor(
            ExecutorConfig(deployment=settings.DEPLOYMENT, state_dir=self.var)
        )
        left = local.live()
        if left:
            self.say(f"stopping {len(left)} local replicas")
            local.cancel(left)
            deadline = time.monotonic() + local.grace_s + STOP_S
            while local.live() and not self._impatient and time.monotonic() < deadline:
                time.sleep(TICK_S)
        if server is not None:
            self._end([server])
        self._lock.close()
        self._lock = None

    def _end(self, children: list[Child]) -> None:
        for child in children:
            child.terminate()
        deadline = time.monotonic() + STOP_S
        for child in children:
            while not child.wait(0.1):
                if self._impatient or time.monotonic() > deadline:
                    child.kill()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._impatient = self.stopping
        self.stopping = True

    def _take_lock(self) -> None:
        file = (self.var / "supervisor.lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            pid = file.read().strip() or "unknown"
            file.close()
            raise SupervisorError(
                f"process {pid} serves {self.var} already; stop it, or set ARCHIPELAGO_VAR to "
                "another folder"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._lock = file

    def _start_broker(self) -> None:
        server = broker.prepare(self.var / "broker")
        use_broker(server.url)
        self._start("broker", server.command)
        self._wait_until(server.ready, "the broker to answer")

    def _start(self, name: str, command: list[str], **more_env: str) -> None:
        child = Child(
            name=name,
            command=command,
            log=self.var / "logs" / f"{name}.log",
            env={**os.environ, "ARCHIPELAGO_VAR": str(self.var), "PYTHONUNBUFFERED": "1"}
            | more_env,
            cwd=settings.BASE_DIR,
        )
        child.start()
        self.children.append(child)

    def _revive(self, child: Child, code: int) -> None:
        now = time.monotonic()
        child.restarts = [at for at in child.restarts if now - at < WITHIN_S]
        if len(child.restarts) >= RESTARTS:
            raise SupervisorError(
                f"{child.name} keeps ending (exit code {code}). Last lines of {child.log}:\n"
                f"{child.last_words()}"
            )
        self.say(f"{child.name} ended (exit code {code}); starting it again (log: {child.log})")
        child.restarts.append(now)
        child.start()

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not ready():
            if self.stopping:
                raise Stopped
            self.check()
            if time.monotonic() > deadline:
                newest = self.children[-1]
                raise SupervisorError(
                    f"waited {START_S:.0f} s in vain for {what}. Last lines of {newest.log}:\n"
                    f"{newest.last_words()}"
                )
            time.sleep(0.05)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((self._reachable_host, self.port), timeout=1).close()
            return True
        return False


def use_broker(url: str) -> None:
    """Let this process and the children it starts from now on use that broker."""
    os.environ["REDIS_URL"] = url
    settings.REDIS_URL = url
    settings.CELERY_BROKER_URL = url
    celery_app.conf.update(broker_url=url)


def check_state_folder(var: Path) -> None:
    """Refuse a folder that cannot be written or a disk that is full, before anything is begun."""
    probe = var / f".probe-{os.getpid()}"
    try:
        var.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * 65_536)
        probe.unlink()
        free = shutil.disk_usage(var).free
    except OSError as error:
        raise SupervisorError(f"the state folder {var} cannot be used: {error.strerror}") from error
    if free < FREE_BYTES:
        raise SupervisorError(
            f"the disk is full: expected {FREE_BYTES / 1e6:.0f} MB free in {var}, "
            f"found {free / 1e6:.0f} MB"
        )
