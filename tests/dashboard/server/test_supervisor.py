"""The supervisor as a person meets it: ``manage.py serve`` in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from dashboard.server import supervisor
from dashboard.server.child_process import Child
from dashboard.server.supervisor import StartWait, Supervisor, SupervisorError, check_state_folder
from executors import LocalProcessExecutor
from executors.base import Cause, ExecutorConfig, ReplicaHandle
from tests.servers import free_ports, wait_until
from tests.stack import REPOSITORY, running_stack, stack_env

if TYPE_CHECKING:
    from tests.stack import LiveStack

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("own_database")]


def serve(var: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """A ``serve`` that must refuse to start."""
    return subprocess.run(
        [sys.executable, "manage.py", "serve", *args],
        cwd=REPOSITORY,
        env=stack_env(var),
        capture_output=True,
        text=True,
        timeout=120,
    )


WORDS = {
    "/valkey-server": "broker", "control@": "control", "ingest@": "ingest", "celery@": "worker",
    " beat ": "beat", "uvicorn": "web",
}  # fmt: skip


def services_of(stack: LiveStack) -> dict[str, psutil.Process]:
    found = {}
    for process in psutil.Process(stack.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command line
            line = " ".join(process.cmdline())
            found.update({name: process for word, name in WORDS.items() if word in line})
    return found


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve(tmp_path / "var", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr == (
        f"archipelago: port {port} on 127.0.0.1 is in use; set ARCHIPELAGO_PORT to another\n"
    )


def test_a_port_that_is_no_port_is_one_clear_line(tmp_path: Path) -> None:
    done = serve(tmp_path / "var", "--port", "http")
    assert (done.returncode, done.stderr) == (
        1,
        "archipelago: port: expected a number from 1 to 65535, found 'http'\n",
    )


def test_a_state_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = serve(tmp_path / "file" / "var")
    assert done.returncode == 1
    assert done.stderr.startswith("archipelago: the state folder cannot be used: Not a directory")
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "free_bytes", lambda folder: 1_000_000)
    with pytest.raises(SupervisorError, match=r"expected 200 MB free in .*, found 1 MB"):
        check_state_folder(tmp_path)


def test_a_second_supervisor_on_the_same_state_is_refused(live_stack: LiveStack) -> None:
    done = serve(live_stack.var, "--port", str(free_ports(1)[0]))
    assert done.returncode == 1
    assert done.stderr == (
        f"archipelago: process {live_stack.pid} serves {live_stack.var} already; stop it, "
        "or set ARCHIPELAGO_VAR to another folder\n"
    )


def test_a_service_that_keeps_ending_ends_the_server_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    running = Supervisor(host="127.0.0.1", port=1, say=said.append)
    child = Child(
        name="worker",
        command=["python", "-c", "raise SystemExit('no such luck')"],
        log=tmp_path / "worker.log",
        env=dict(os.environ),
        cwd=tmp_path,
    )
    child.start()
    running.children.append(child)
    with pytest.raises(SupervisorError, match=r"worker keeps ending \(exit code 1\)[^$]*luck"):
        for _ in range(20):
            child.wait(60)
            running.check()
    assert len(said) == supervisor.RESTARTS


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalProcessExecutor]:
    """The executor of local replicas in the state folder ``tmp_path``."""
    (tmp_path / "deployment").write_text("tested")
    executor = LocalProcessExecutor(ExecutorConfig(deployment="tested", state_dir=tmp_path))
    yield executor
    left = executor.live()
    executor.cancel(left)
    executor.collect(left, 60)


def launch(executor: LocalProcessExecutor) -> ReplicaHandle:
    """A replica as the worker launches one."""
    (handle,) = executor.launch_replicas(1, "http.server", {"args": ["--bind=127.0.0.1", "0"]})
    return handle


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
def test_a_child_may_take_its_time_as_long_as_it_makes_progress(
    figures: list[tuple[float, int]], expected: str
) -> None:
    wait = StartWait(now=0.0)
    for second, figure in enumerate(figures):
        wait.saw(figure, float(second))
    assert wait.over(float(len(figures) - 1)) == expected


def test_a_slow_start_is_reported_every_few_seconds() -> None:
    wait = StartWait(now=0.0)
    assert [second for second in range(17) if wait.reports(float(second))] == [5, 10, 15]


def test_activity_counts_processor_time_of_the_child_and_its_log(tmp_path: Path) -> None:
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


def test_a_child_that_is_stuck_ends_the_start_and_the_message_has_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    running = Supervisor(host="127.0.0.1", port=1, say=reported.append)
    child = Child(
        name="web", command=["python", "-c", "input()"], log=tmp_path / "web.log", env={},
        cwd=tmp_path,
    )  # fmt: skip
    running.children.append(child)
    monkeypatch.setattr(supervisor, "IDLE_S", 0.2)
    monkeypatch.setattr(supervisor, "REPORT_S", 0.05)
    with pytest.raises(SupervisorError, match=r"web did not start, it has used no processor time"):
        running._wait_until(lambda: False, "the web server to answer")
    assert reported[0].startswith("waiting for the web server to answer")
    assert str(child.log) in reported[0]


def test_while_the_disk_is_full_a_child_is_started_again_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    running = Supervisor(host="127.0.0.1", port=1, say=reported.append)
    child = Child(
        name="worker", command=["python", "-c", ""], log=tmp_path / "worker.log", env={},
        cwd=tmp_path,
    )  # fmt: skip
    child.start()
    running.children.append(child)
    monkeypatch.setattr(supervisor, "RETRY_S", 0.0)
    free = [1_000_000]
    monkeypatch.setattr(supervisor, "free_bytes", lambda folder: free[0])
    for _ in range(2 * supervisor.RESTARTS):
        assert child.wait(60)
        running.check()
    assert len(reported) == 1
    assert "the disk is full: expected 20 MB free" in reported[0]
    free[0] = 10**9
    assert child.wait(60)
    running.check()
    assert "starting it again" in reported[1]
    child.wait(60)


def test_a_database_of_a_newer_version_is_refused(tmp_path: Path, live_stack: LiveStack) -> None:
    applied = (
        "from django.db.migrations.recorder import MigrationRecorder as R\n"
        "from django.db import connection\n"
    )
    live_stack.python(applied + "R(connection).record_applied('runs', '9999_later')")
    try:
        done = live_stack.python(
            "from dashboard.server.supervisor import Supervisor\n"
            "try: Supervisor(host='127.0.0.1', port=1, say=print)._migrate()\n"
            "except Exception as error: print(type(error).__name__, error)"
        )
        ready = live_stack.python(
            "from runs.backends.health import readiness\nprint(readiness()['database'])"
        )
    finally:
        live_stack.python(applied + "R(connection).record_unapplied('runs', '9999_later')")
    assert done.startswith("SupervisorError the database was used by a newer version")
    assert "runs.9999_later" in done
    assert ready == "was migrated by a newer version"


def wait_for_the_end_of(processes: list[psutil.Process]) -> None:
    def all_gone() -> bool:
        return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)

    wait_until(all_gone, "the end of every service")


def test_killed_services_come_back_and_an_interrupt_ends_what_this_server_started(
    tmp_path: Path, local: LocalProcessExecutor
) -> None:
    earlier = launch(local)
    with running_stack(tmp_path) as stack:
        assert "found 1 local replicas of an earlier server" in stack.said()
        own = launch(local)
        before = services_of(stack)
        assert set(before) == {"broker", "control", "ingest", "worker", "beat", "web"}
        for name in ("worker", "broker"):
            before[name].kill()
        wait_until(
            lambda: not set(services_of(stack).values()) & {before["worker"], before["broker"]},
            "the end of what was killed",
        )
        wait_until(lambda: set(services_of(stack)) == set(before), "new ones")
        assert "worker ended (exit code -9); starting it again" in stack.said()
        everybody = psutil.Process(stack.pid).children(recursive=True)
        os.kill(stack.pid, signal.SIGINT)
        wait_for_the_end_of(everybody)
        wait_until(lambda: local.live() == [earlier], "the end of the own local replica")
    assert local.poll([own])[0].cause is Cause.CANCELLED
    assert "Traceback" not in (tmp_path / "serve.log").read_text()


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells a parent's death"
)
def test_no_service_outlives_a_killed_supervisor_but_replicas_train_on(
    tmp_path: Path, local: LocalProcessExecutor
) -> None:
    with running_stack(tmp_path) as stack:
        handle = launch(local)
        everybody = psutil.Process(stack.pid).children(recursive=True)
        assert len(everybody) > 4
        os.kill(stack.pid, signal.SIGKILL)
        wait_for_the_end_of(everybody)
        assert local.live() == [handle]


def test_a_server_that_cannot_start_ends_no_local_replica(
    tmp_path: Path, local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.VAR_DIR, settings.DEPLOYMENT = tmp_path, "tested"
    handle = launch(local)
    reported: list[str] = []
    running = Supervisor(host="127.0.0.1", port=free_ports(1)[0], say=reported.append)

    def fail() -> None:
        launch(local)  # its own replicas go on as well: an error of the server is not theirs
        raise SupervisorError("the worker keeps ending")

    monkeypatch.setattr(running, "_start_broker", fail)
    monkeypatch.delenv("REDIS_URL")
    with pytest.raises(SupervisorError, match="keeps ending"), running:
        running.start()
    assert handle in local.live() and len(local.live()) == 2
    assert reported[-1] == "2 local replicas go on training; the next start finds them again"
