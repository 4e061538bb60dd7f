"""The supervisor: starts and stops all processes of the server: broker, workers, beat, web.

::

    manage.py serve --- valkey-server   (unless REDIS_URL names another broker)
                    |-- celery worker (control)
                    |-- celery worker (ingest)
                    |-- celery worker (everything else)
                    |-- celery beat
                    `-- uvicorn

For a single machine; ``docker-compose.yml`` runs the same commands as services. State and logs are
in the state folder, and a lock allows one supervisor per folder. A child that exits is restarted. A
child that keeps exiting stops the server with the tail of its log, unless the disk is full: then it
is restarted every few seconds until there is space.

SIGINT, SIGTERM or SIGHUP stop every child and every local replica that this server started; a
second signal kills them. Local replicas of an earlier server continue, and so do all local replicas
if the server stops because of its own error or is killed (Linux then ends its children, see
:mod:`executors.process_guard`): the next start finds them again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
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

from dashboard.celery import app as celery_app
from dashboard.security import private_files
from dashboard.server import broker, commands
from dashboard.server.child_process import Child
from executors import LocalProcessExecutor
from executors.base import ExecutorConfig, ReplicaHandle
from runs.disk import FULL_BYTES, free_bytes
from runs.schema import IncompatibleSchema, compare_schema, refuse_newer

FREE_BYTES = 200_000_000
IDLE_S = 60.0
"""A starting child that has used no CPU time for this long is stuck."""
START_S = 900.0
"""The longest wait for a child that makes progress."""
REPORT_S = 5.0
RETRY_S = 5.0
"""Interval between restarts of a child while the disk is full."""
STOP_S = 10.0
TICK_S = 0.2
RESTARTS, WITHIN_S = 5, 60.0
"""A child that exits more often than this is not restarted."""


class SupervisorError(Exception):
    """The server cannot start or continue; the message has the reason."""


class Stopped(Exception):
    """A signal arrived while the server was starting."""


class Supervisor:
    """Use it as a context manager: leaving the block stops everything. ``report`` prints a line."""

    def __init__(self, *, host: str, port: int, report: Callable[[str], None]) -> None:
        self.host = host
        self.port = port
        self.report = report
        self.var: Path = settings.VAR_DIR
        self.children: list[Child] = []
        self.stopping = False
        self._lock: TextIO | None = None
        self._impatient = False
        self._earlier: frozenset[str] = frozenset()
        """Launch keys of local replicas that were running before this server started."""
        self._full_since: float | None = None

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

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        failed = kind is not None and issubclass(kind, SupervisorError)
        self.stop(end_replicas=not failed)

    def start(self) -> None:
        """Start everything in order. Returns when the web server responds."""
        check_state_folder(self.var)
        if changed := private_files.tighten(self.var):
            names = ", ".join(path.name for path in changed[:5])
            more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
            self.report(f"removed the permissions of other accounts from {names}{more}")
        self._take_lock()
        self._earlier = frozenset(handle.launch_key for handle in self._local().live())
        if self._earlier:
            self.report(f"found {len(self._earlier)} local replicas of an earlier server")
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
        self._migrate()
        self._start("control", commands.control())
        self._start("ingest", commands.ingest(), ARCHIPELAGO_PROCESS_MB=str(commands.INGEST_MB))
        self._start("worker", commands.worker())
        self._start("beat", commands.beat())
        self._start("web", commands.web(host=self.host, port=self.port))
        self._wait_until(self._answers, "the web server")

    def _migrate(self) -> None:
        try:
            schema = compare_schema()
            refuse_newer(schema)
            if schema.missing:
                self.report("preparing the database")
            call_command("migrate", verbosity=0, interactive=False)
        except IncompatibleSchema as error:
            raise SupervisorError(str(error)) from error
        except DatabaseError as error:
            raise SupervisorError(f"the database cannot be used: {error}") from error

    def check(self) -> None:
        """Restart children that exited. Raises :class:`SupervisorError` if one keeps exiting."""
        for child in self.children:
            code = child.ended()
            if code is not None and not self.stopping:
                self._revive(child, code)

    def wait(self, seconds: float = TICK_S) -> None:
        """Restart children for some time, or until the server is stopped."""
        deadline = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < deadline:
            self.check()
            time.sleep(min(TICK_S, seconds))

    def stop(self, *, end_replicas: bool = True) -> None:
        """Stop every child and, with ``end_replicas``, every local replica that this server
        started."""
        self.stopping = True
        if self._lock is None:
            return
        by_name = {child.name: child for child in self.children}
        server = by_name.pop("broker", None)
        # The workers first: they would record the local replicas that end below as lost.
        self._end(list(by_name.values()))
        if end_replicas:
            self._end_replicas()
        left = len(self._local().live())
        if left:
            self.report(f"{left} local replicas keep training; the next start finds them again")
        if server is not None:
            self._end([server])
        self._lock.close()
        self._lock = None

    def _local(self) -> LocalProcessExecutor:
        return LocalProcessExecutor(
            ExecutorConfig(deployment=settings.DEPLOYMENT, state_dir=self.var)
        )

    def _end_replicas(self) -> None:
        local = self._local()

        def own() -> list[ReplicaHandle]:
            return [handle for handle in local.live() if handle.launch_key not in self._earlier]

        if ending := own():
            self.report(f"stopping {len(ending)} local replicas")
            local.cancel(ending)
            deadline = time.monotonic() + local.grace_s + STOP_S
            while own() and not self._impatient and time.monotonic() < deadline:
                time.sleep(TICK_S)

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
                f"process {pid} already serves {self.var}; stop it, or set ARCHIPELAGO_VAR to "
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
        self._wait_until(server.ready, "the broker")

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
        if free_bytes(self.var) < FULL_BYTES:
            self._wait_for_space(child, now)
            return
        self._full_since = None
        child.restarts = [at for at in child.restarts if now - at < WITHIN_S]
        if len(child.restarts) >= RESTARTS:
            raise SupervisorError(
                f"{child.name} keeps exiting (exit code {code}). Last lines of {child.log}:\n"
                f"{child.log_tail()}"
            )
        self.report(f"{child.name} exited (exit code {code}); restarting it (log: {child.log})")
        child.restarts.append(now)
        child.start()

    def _wait_for_space(self, child: Child, now: float) -> None:
        """Restart a child that exited because of a full disk, after a delay."""
        if self._full_since is None:
            self.report(
                f"the disk is full: expected {FULL_BYTES / 1e6:.0f} MB free in {self.var}, found "
                f"{free_bytes(self.var) / 1e6:.0f} MB; {child.name} exited and is restarted "
                f"every {RETRY_S:.0f} s. Free some space."
            )
            self._full_since = now
        if not child.restarts or now - child.restarts[-1] >= RETRY_S:
            child.restarts = [now]
            child.start()

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for ``ready``, as long as the newest child makes progress."""
        newest = self.children[-1]
        wait = StartWait(now=time.monotonic())
        while not ready():
            if self.stopping:
                raise Stopped
            self.check()
            now = time.monotonic()
            if wait.reports(now):
                self.report(f"waiting for {what} ({now - wait.began:.0f} s); log: {newest.log}")
                wait.saw(newest.activity(), now)
            if reason := wait.over(now):
                raise SupervisorError(_start_failure(newest, what, reason))
            time.sleep(0.05)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((self._reachable_host, self.port), timeout=1).close()
            return True
        return False


class StartWait:
    """The wait for a starting child: as long as it makes progress."""

    def __init__(self, *, now: float) -> None:
        self.began = self._moved = self._reported = now
        self._seen: tuple[float, int] | None = None

    def reports(self, now: float) -> bool:
        """Whether the next progress message is due."""
        if now - self._reported < REPORT_S:
            return False
        self._reported = now
        return True

    def saw(self, activity: tuple[float, int], now: float) -> None:
        """Record the values of :meth:`Child.activity`."""
        if activity != self._seen:
            self._seen, self._moved = activity, now

    def over(self, now: float) -> str:
        """Why the wait is over; '' while it is not."""
        if now - self._moved > IDLE_S:
            return f"it has used no processor time for {IDLE_S:.0f} s"
        if now - self.began > START_S:
            return f"it has not started in {START_S:.0f} s"
        return ""


def _start_failure(child: Child, what: str, reason: str) -> str:
    log = child.log_tail()
    end = f"Last lines of {child.log}:\n{log}" if log else f"{child.log} is empty."
    return f"{child.name} did not start, {reason} (waiting for {what}). {end}"


def use_broker(url: str) -> None:
    """Use that broker in this process and in children started from now on."""
    os.environ["REDIS_URL"] = url
    settings.REDIS_URL = url
    settings.CELERY_BROKER_URL = url
    celery_app.conf.update(broker_url=url)


def check_state_folder(var: Path) -> None:
    """Raise if the state folder is not writable or the disk is full."""
    probe = var / f".probe-{os.getpid()}"
    try:
        var.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * 65_536)
        probe.unlink()
        free = free_bytes(var)
    except OSError as error:
        raise SupervisorError(f"the state folder {var} cannot be used: {error.strerror}") from error
    if free < FREE_BYTES:
        raise SupervisorError(
            f"the disk is full: expected {FREE_BYTES / 1e6:.0f} MB free in {var}, "
            f"found {free / 1e6:.0f} MB"
        )
