"""Test division between worker processes: order, crashed workers, and a killed session."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import parallel
from tests.servers import wait_until
from tests.session_folder import PREFIX, remove_stale
from tests.stack import REPOSITORY

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=1)]

CONFTEST = """
from tests import parallel

def pytest_configure(config):
    config.addinivalue_line("markers", "browser: a browser test")
    config.addinivalue_line("markers", "processes: a test that starts processes")
    config.addinivalue_line("markers", "slow(minutes): a slow file")
    config.addinivalue_line("markers", "weight(tests): a long test")
    if hasattr(config, "workerinput"):
        parallel.end_with_controller()

def pytest_collection_modifyitems(items):
    parallel.sort_by_stage(items)

def pytest_xdist_make_scheduler(config, log):
    return parallel.FileScheduling(config, log)
"""
QUICK = "def test_quick(): pass\n"
MIXED = """
import pytest

@pytest.mark.browser
def test_page(): pass

def test_quick(): pass

@pytest.mark.processes
def test_process(): pass

def test_another(): pass
"""
LONG = """
import pytest

@pytest.mark.weight(3)
def test_long(): pass
"""
SLOW = """
import pytest

@pytest.mark.processes
@pytest.mark.slow(minutes={minutes})
def test_slow(): pass
"""
CRASH = """
import os

def test_before(): pass
def test_crash(): os._exit(1)
def test_after(): pass
def test_last(): pass
"""
WAIT = """
import os, pathlib, signal, subprocess, sys
from tests.servers import child

def test_wait(tmp_path):
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with child(command, log=tmp_path / "log") as process:
        new = pathlib.Path({pids!r} + ".new")
        new.write_text(f"{{os.getpid()}} {{process.pid}}")
        new.rename({pids!r})
        signal.pause()
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "no:cacheprovider"]
    return subprocess.Popen(
        [*command, f"--rootdir={folder}", *arguments, str(folder)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(folder: Path, *arguments: str) -> str:
    with start(folder, *arguments) as process:
        text, _ = process.communicate(timeout=600)
    return text


def test_browser_tests_are_last_and_tests_with_processes_between_quick_ones(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(MIXED)
    (tmp_path / "test_b.py").write_text(QUICK)
    (tmp_path / "test_c.py").write_text(SLOW.format(minutes=1))
    (tmp_path / "test_d.py").write_text(SLOW.format(minutes=2))
    (tmp_path / "test_e.py").write_text(LONG)
    text = output(tmp_path, "-v", "-n", "1")
    order = re.findall(r"PASSED.* (test_\w+\.py::\w+)", text)
    assert order == [
        "test_e.py::test_long",
        "test_d.py::test_slow",
        "test_a.py::test_quick",
        "test_a.py::test_another",
        "test_c.py::test_slow",
        "test_b.py::test_quick",
        "test_a.py::test_process",
        "test_a.py::test_page",
    ], text


def test_workers_begin_the_collection_at_equal_shares_of_the_modules(tmp_path: Path) -> None:
    for file in ("a/test_1.py", "b/c/test_2.py", "b/test_3.py", "b/empty.py", "test_d.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "without_tests").mkdir()
    orders = [parallel.rotated(tmp_path, share) for share in (0, 1 / 4, 3 / 4, 0.9)]
    names = [[Path(entry).name for entry in order] for order in orders]
    a, b, d = ["a", "b", "test_d.py"]
    assert names == [[a, b, d], [b, d, a], [d, a, b], [a, b, d]]


def test_a_unit_is_the_part_of_a_file_in_one_stage() -> None:
    units = parallel.units(["a.py::one", "a.py::two", "b.py::one", "a.py::page"])
    assert units["a.py::one"] == units["a.py::two"]
    assert len(set(units.values())) == 3


def test_a_crashed_worker_fails_only_the_test_that_it_was_running(tmp_path: Path) -> None:
    (tmp_path / "test_crash.py").write_text(CRASH)
    (tmp_path / "test_quick.py").write_text(QUICK)
    text = output(tmp_path, "-n", "2", "-rf")
    assert "1 failed, 4 passed" in text, text
    assert re.search(r"^FAILED test_crash\.py::test_crash", text, re.MULTILINE), text


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process with its parent")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_session_that_is_ended_from_outside(
    tmp_path: Path, number: signal.Signals
) -> None:
    pids = tmp_path / "pids"
    (tmp_path / "test_wait.py").write_text(WAIT.format(pids=str(pids)))
    with start(tmp_path, "-n", "1") as controller:
        wait_until(pids.exists, "the test's child", process=controller)
        processes = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        controller.send_signal(number)
        controller.communicate(timeout=600)
    gone, alive = psutil.wait_procs(processes, timeout=600)
    assert len(gone) == 2, alive


def test_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    names = [f"{PREFIX}{ended.pid}-old", f"{PREFIX}{os.getpid()}-own", f"{PREFIX}other-x", "folder"]
    for name in names:
        (tmp_path / name).mkdir()
    remove_stale(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
