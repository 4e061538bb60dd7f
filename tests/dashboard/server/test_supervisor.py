"""The supervisor: ``manage.py serve`` in a separate state folder."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from dashboard.server import supervisor
from dashboard.server.child_process import Child
from dashboard.server.supervisor import StartWait, Supervisor, SupervisorError, check_state_folder
from executors import LocalProcessExecutor
from executors.base import Cause, ExecutorConfig, ReplicaHandle
from tests.servers import free_ports, wait_until
from tests.stack import REPOSITORY, LiveStack, running_stack, stack_env

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow(minutes=2),
    pytest.mark.usefixtures("own_database"),
]


def serve(var: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """A ``serve`` whose start must fail."""
    return subprocess.run(
        [sys.executable, "manage.py", "serve", *args],
        cwd=REPOSITORY,
        env=stack_env(var),
        capture_output=True,
        text=True,
        timeout=120,
    )


LOOK_S = 0.1
"""Between two looks at the processes of this machine, which take a hundredth of a second."""

WORDS = {
    "/valkey-server": "broker",
    "control@": "control",
    "ingest@": "ingest",
    "celery@": "worker",
    " beat ": "beat",
    "uvicorn": "web",
}


def services_of(stack: LiveStack) -> dict[str, psutil.Process]:
    result = {}
    for process in psutil.Process(stack.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command line
            line = " ".join(process.cmdline())
            result.update({name: process for word, name in WORDS.items() if word in line})
    return result


@contextlib.contextmanager
def local_replicas(var: Path) -> Iterator[LocalProcessExecutor]:
    """The executor of local replicas in the state folder ``var``."""
    (var / "deployment").write_text("tested")
    executor = LocalProcessExecutor(ExecutorConfig(deployment="tested", state_dir=var))
    yield executor
    left = executor.live()
    executor.cancel(left)
    executor.collect(left, 60)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalProcessExecutor]:
    with local_replicas(tmp_path) as executor:
        yield executor


def launch(executor: LocalProcessExecutor) -> ReplicaHandle:
    """A replica launched as a worker launches it."""
    (handle,) = executor.launch_replicas(1, "http.server", {"args": ["--bind=127.0.0.1", "0"]})
    return handle


@dataclass(frozen=True)
class Served:
    """A server that several tests use; the last one stops it."""

    stack: LiveStack
    local: LocalProcessExecutor
    earlier: ReplicaHandle
    """A replica of an earlier server of the state folder."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, own_database: None) -> Iterator[Served]:
    var = tmp_path_factory.mktemp("served")
    with local_replicas(var) as local:
        earlier = launch(local)
        with running_stack(var) as stack:
            yield Served(stack, local, earlier)


def test_a_port_in_use_is_reported_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve(tmp_path / "var", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr == (
        f"archipelago: port {port} on 127.0.0.1 is in use; set ARCHIPELAGO_PORT to another\n"
    )


def test_an_invalid_port_is_reported_in_one_line(tmp_path: Path) -> None:
    done = serve(tmp_path / "var", "--port", "http")
    assert (done.returncode, done.stderr) == (
        1,
        "archipelago: port: expected a number from 1 to 65535, found 'http'\n",
    )


def test_an_unusable_state_folder_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = serve(tmp_path / "file" / "var")
    assert done.returncode == 1
    assert done.stderr.startswith("archipelago: the state folder cannot be used: Not a directory")
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_reported_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "free_bytes", lambda folder: 1_000_000)
    with pytest.raises(SupervisorError, match=r"expected 200 MB free in .*, found 1 MB"):
        check_state_folder(tmp_path)


def test_a_second_supervisor_of_a_state_folder_is_rejected(served: Served) -> None:
    stack = served.stack
    done = serve(stack.var, "--port", str(free_ports(1)[0]))
    assert done.returncode == 1
    assert done.stderr == (
        f"archipelago: process {stack.pid} already serves {stack.var}; stop it, "
        "or set ARCHIPELAGO_VAR to another folder\n"
    )


def test_a_service_that_keeps_exiting_stops_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output: list[str] = []
    running = Supervisor(host="127.0.0.1", port=1, report=output.append)
    child = Child(
        name="worker",
        command=["python", "-c", "raise SystemExit('no such luck')"],
        log=tmp_path / "worker.log",
        env=dict(os.environ),
        cwd=tmp_path,
    )
    child.start()
    running.children.append(child)
    monkeypatch.setattr(supervisor, "WITHIN_S", 3600.0)
    with pytest.raises(SupervisorError, match=r"worker keeps exiting \(exit code 1\)[^$]*luck"):
        for _ in range(20):
            child.wait(600)
            running.check()
    assert len(output) == supervisor.RESTARTS


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ([(float(second), 0) for second in range(800)], ""),
        ([(0.0, second) for second in range(800)], ""),
        ([(1.0, 10)] * 59, ""),
        ([(1.0, 10)] * 70, "it has used no processor time for 60 s"),
        ([(float(second), 0) for second in range(1000)], "it has not started in 900 s"),
    ],
    ids=["it computes", "it logs", "it rests for a while", "it is stuck", "it never comes up"],
)
def test_a_slow_start_is_allowed_while_the_child_makes_progress(
    figures: list[tuple[float, int]], expected: str
) -> None:
    wait = StartWait(now=0.0)
    for second, figure in enumerate(figures):
        wait.saw(figure, float(second))
    assert wait.over(float(len(figures) - 1)) == expected


def test_a_slow_start_is_reported_every_few_seconds() -> None:
    wait = StartWait(now=0.0)
    assert [second for second in range(17) if wait.reports(float(second))] == [5, 10, 15]


def test_activity_is_cpu_time_and_log_size(tmp_path: Path) -> None:
    log = tmp_path / "busy.log"
    code = (
        "import time\nwhile time.process_time() < 0.5: pass\n"
        "print('up', flush=True)\ntime.sleep(600)"
    )
    child = Child(
        name="web", command=["python", "-c", code], log=log, env=dict(os.environ), cwd=tmp_path
    )
    assert child.activity() == (0.0, 0)
    child.start()
    try:
        wait_until(lambda: child.ended() is not None or "up" in log.read_text(), "its output")
        seen = child.activity()
    finally:
        child.kill()
    assert seen[0] >= 0.4 and seen[1] > 0


def test_a_stuck_child_fails_the_start_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    running = Supervisor(host="127.0.0.1", port=1, report=reported.append)
    child = Child(
        name="web",
        command=["python", "-c", "input()"],
        log=tmp_path / "web.log",
        env={},
        cwd=tmp_path,
    )
    running.children.append(child)
    monkeypatch.setattr(supervisor, "IDLE_S", 0.2)
    monkeypatch.setattr(supervisor, "REPORT_S", 0.05)
    with pytest.raises(SupervisorError, match=r"web did not start, it has used no processor time"):
        running._wait_until(lambda: False, "the web server")
    assert reported[0].startswith("waiting for the web server")
    assert str(child.log) in reported[0]


def test_on_a_full_disk_a_child_is_restarted_until_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    running = Supervisor(host="127.0.0.1", port=1, report=reported.append)
    child = Child(
        name="worker",
        command=["python", "-c", ""],
        log=tmp_path / "worker.log",
        env={},
        cwd=tmp_path,
    )
    child.start()
    running.children.append(child)
    monkeypatch.setattr(supervisor, "RETRY_S", 0.0)
    free = [1_000_000]
    monkeypatch.setattr(supervisor, "free_bytes", lambda folder: free[0])
    for _ in range(2 * supervisor.RESTARTS):
        assert child.wait(600)
        running.check()
    assert len(reported) == 1
    assert "the disk is full: expected 20 MB free" in reported[0]
    free[0] = 10**9
    assert child.wait(600)
    running.check()
    assert "restarting it" in reported[1]
    child.wait(600)


def test_a_database_of_a_newer_version_is_rejected(served: Served) -> None:
    applied = (
        "from django.db.migrations.recorder import MigrationRecorder as R\n"
        "from django.db import connection\n"
    )
    served.stack.python(applied + "R(connection).record_applied('runs', '9999_later')")
    try:
        done = served.stack.python(
            "from dashboard.server.supervisor import Supervisor\n"
            "try: Supervisor(host='127.0.0.1', port=1, report=print)._migrate()\n"
            "except Exception as error: print(type(error).__name__, error)"
        )
        ready = served.stack.python(
            "from runs.backends.health import readiness\nprint(readiness()['database'])"
        )
    finally:
        served.stack.python(applied + "R(connection).record_unapplied('runs', '9999_later')")
    assert done.startswith("SupervisorError the database was used by a newer version")
    assert "runs.9999_later" in done
    assert ready == "was migrated by a newer version"


def wait_for_the_end_of(processes: list[psutil.Process]) -> None:
    def runs(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    wait_until(lambda: not any(map(runs, processes)), "the end of every service")


def test_killed_services_restart_and_an_interrupt_stops_all(served: Served) -> None:
    stack, local, earlier = served.stack, served.local, served.earlier
    assert "found 1 local replicas of an earlier server" in stack.output()
    own = launch(local)
    before = services_of(stack)
    assert set(before) == {"broker", "control", "ingest", "worker", "beat", "web"}
    for name in ("worker", "broker"):
        before[name].kill()
    wait_until(
        lambda: not set(services_of(stack).values()) & {before["worker"], before["broker"]},
        "the end of the killed services",
        every_s=LOOK_S,
    )
    wait_until(lambda: set(services_of(stack)) == set(before), "new ones", every_s=LOOK_S)
    assert "worker exited (exit code -9); restarting it" in stack.output()
    processes = psutil.Process(stack.pid).children(recursive=True)
    os.kill(stack.pid, signal.SIGINT)
    wait_for_the_end_of(processes)
    wait_until(lambda: local.live() == [earlier], "the end of the own local replica")
    assert local.poll([own])[0].cause is Cause.CANCELLED
    assert "Traceback" not in stack.output()


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux signals the death of a parent"
)
def test_services_end_with_a_killed_supervisor_and_replicas_continue(
    tmp_path: Path, local: LocalProcessExecutor
) -> None:
    with running_stack(tmp_path, has_users=False) as stack:
        handle = launch(local)
        processes = psutil.Process(stack.pid).children(recursive=True)
        assert len(processes) > 4
        os.kill(stack.pid, signal.SIGKILL)
        wait_for_the_end_of(processes)
        assert local.live() == [handle]


def test_a_failed_start_ends_no_local_replica(
    tmp_path: Path, local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.VAR_DIR, settings.DEPLOYMENT = tmp_path, "tested"
    handle = launch(local)
    reported: list[str] = []
    running = Supervisor(host="127.0.0.1", port=free_ports(1)[0], report=reported.append)

    def fail() -> None:
        launch(local)  # its own replicas continue too: the server's error does not affect them
        raise SupervisorError("the worker keeps exiting")

    monkeypatch.setattr(running, "_start_broker", fail)
    monkeypatch.delenv("REDIS_URL")
    with pytest.raises(SupervisorError, match="keeps exiting"), running:
        running.start()
    assert handle in local.live() and len(local.live()) == 2
    assert reported[-1] == "2 local replicas keep training; the next start finds them again"
