from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dashboard.server.child_process import LOG_LIMIT_BYTES, Child
from tests.servers import wait_until

pytestmark = pytest.mark.processes

# Prints its pid and that of its own child, then waits; the child ignores SIGTERM.
_PARENT = """
import subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    "time.sleep(600)"])
print(inner.pid, flush=True)
time.sleep(600)
"""


def make(tmp_path: Path, code: str) -> Child:
    return Child(
        name="it",
        command=["python", "-c", code],
        log=tmp_path / "logs" / "it.log",
        env=dict(os.environ),
        cwd=tmp_path,
    )


@pytest.fixture
def family(tmp_path: Path) -> Iterator[tuple[Child, int]]:
    """A child, and the pid of its own child."""
    child = make(tmp_path, _PARENT)
    child.start()
    wait_until(lambda: child.log.read_text().count("\n") == 2, "its first words")
    inner = int(next(line for line in child.log.read_text().split() if line.isdigit()))
    yield child, inner
    child.kill()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_exit_code_and_log_tail(tmp_path: Path) -> None:
    child = make(tmp_path, "print(*range(9), sep='\\n'); raise SystemExit(3)")
    child.start()
    assert child.wait(600)
    assert child.ended() == 3
    assert child.log_tail(2) == "7\n8"


def test_kill_ends_the_process_group(family: tuple[Child, int]) -> None:
    child, inner = family
    child.kill()
    wait_until(lambda: is_gone(inner), "the grandchild's end")
    assert child.ended() == -signal.SIGKILL


def test_descendants_of_an_exited_child_are_killed(family: tuple[Child, int]) -> None:
    child, inner = family
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(600)
    wait_until(lambda: is_gone(inner), "the grandchild's end")


def test_terminate_only_signals_the_child(family: tuple[Child, int]) -> None:
    """Celery and uvicorn shut down their workers themselves, so these must get no signal."""
    child, inner = family
    child.terminate()
    assert child.wait(600)
    assert child.ended() == -signal.SIGTERM
    wait_until(lambda: is_gone(inner), "the grandchild's end")


def test_a_missing_program_is_reported_in_the_log(tmp_path: Path) -> None:
    child = make(tmp_path, "")
    child.command = ["no-such-program-here"]
    child.start()
    assert child.wait(600)
    assert child.ended() == 1
    assert "cannot start no-such-program-here: No such file" in child.log_tail()


def test_a_large_log_is_rotated(tmp_path: Path) -> None:
    child = make(tmp_path, "")
    child.log.parent.mkdir()
    with child.log.open("wb") as file:
        file.truncate(LOG_LIMIT_BYTES + 1)
    child.start()
    assert child.wait(600)
    assert child.log.stat().st_size == 0
    assert child.log.with_suffix(".log.1").stat().st_size == LOG_LIMIT_BYTES + 1


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux signals the death of a parent"
)
def test_the_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    repository = Path(__file__).resolve().parents[3]
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from dashboard.server.child_process import Child\n"
        "c = Child(name='it', command=['python', '-c', 'import time; time.sleep(600)'], "
        "log=Path(sys.argv[1]), env=dict(os.environ), cwd=Path('/'))\n"
        "c.start(); print(c.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "log"], cwd=repository, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(lambda: is_gone(pid), "the child's end")
