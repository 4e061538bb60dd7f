"""The supervisor as a person meets it: ``manage.py serve`` in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from dashboard import supervisor
from dashboard.children import Child
from dashboard.supervisor import Supervisor, SupervisorError, check_state_folder
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
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(supervisor.shutil, "disk_usage", lambda path: usage)
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
def replica(tmp_path: Path) -> Iterator[tuple[LocalProcessExecutor, ReplicaHandle]]:
    """A local replica in the state folder ``tmp_path``, as the worker would have launched it."""
    (tmp_path / "deployment").write_text("tested")
    executor = LocalProcessExecutor(ExecutorConfig(deployment="tested", state_dir=tmp_path))
    (handle,) = executor.launch_replicas(1, "http.server", {"args": ["--bind=127.0.0.1", "0"]})
    yield executor, handle
    executor.cancel([handle])
    executor.collect([handle], 60)


def wait_for_the_end_of(processes: list[psutil.Process]) -> None:
    def all_gone() -> bool:
        return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)

    wait_until(all_gone, "the end of every service")


def test_killed_services_come_back_and_an_interrupt_ends_all(
    tmp_path: Path, replica: tuple[LocalProcessExecutor, ReplicaHandle]
) -> None:
    executor, handle = replica
    with running_stack(tmp_path) as stack:
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
        wait_until(lambda: not executor.live(), "the end of the local replica")
    assert executor.poll([handle])[0].cause is Cause.CANCELLED
    assert "Traceback" not in (tmp_path / "serve.log").read_text()


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells a parent's death"
)
def test_no_service_outlives_a_killed_supervisor_but_replicas_train_on(
    tmp_path: Path, replica: tuple[LocalProcessExecutor, ReplicaHandle]
) -> None:
    executor, handle = replica
    with running_stack(tmp_path) as stack:
        everybody = psutil.Process(stack.pid).children(recursive=True)
        assert len(everybody) > 4
        os.kill(stack.pid, signal.SIGKILL)
        wait_for_the_end_of(everybody)
        assert executor.live() == [handle]
