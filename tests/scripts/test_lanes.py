"""Commands side by side: that no failure goes unseen, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scripts import lanes
from tests.servers import wait_until

SCRIPT = Path(lanes.__file__)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def program(folder: Path, name: str, code: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(code)
    return f"{name}={sys.executable} {path}"


def ended(*arguments: str) -> tuple[int, str]:
    with start(*arguments) as process:
        said, _ = process.communicate(timeout=60)
    return process.returncode, said


def test_failures_of_all_lanes_are_the_last_lines(tmp_path: Path) -> None:
    failing = "print('{}')\nprint('x\\n' * 200)\nprint('3 failed')\nraise SystemExit(1)"
    status, said = ended(
        program(tmp_path, "one", failing.format("FAILED tests/a.py::test_a - Error: no")),
        program(tmp_path, "two", "print('7 passed in 1s')"),
        program(tmp_path, "three", failing.format("ERROR tests/c.py::test_c - at setup")),
    )
    assert status == 1
    *_, heading, first, second = said.splitlines()
    assert heading == "== failed: one, three"
    assert first == "one: FAILED tests/a.py::test_a - Error: no"
    assert second == "three: ERROR tests/c.py::test_c - at setup"
    assert "; 7 passed in 1s\n" in said
    assert said.count("FAILED tests/a.py") == 2, "once in its log, once at the end"


def test_what_passes_is_told_in_lines(tmp_path: Path) -> None:
    status, said = ended(program(tmp_path, "quiet", "print('noise\\n' * 50 + '5 passed')"))
    assert status == 0
    assert "noise" not in said
    assert said.splitlines()[-1].startswith("quiet: passed in ")


def test_a_lane_that_is_killed_fails_the_whole(tmp_path: Path) -> None:
    code = "import os, signal\nprint('5 passed', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    status, said = ended(program(tmp_path, "shot", code))
    assert status == 1
    assert said.splitlines()[-1].startswith("shot: killed by SIGKILL after ")


@pytest.mark.parametrize("heeds", [True, False])
def test_a_lane_past_its_limit_fails_even_if_it_says_it_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heeds: bool
) -> None:
    ready = tmp_path / "ready"
    answer = "lambda *_: sys.exit(0)" if heeds else "signal.SIG_IGN"
    code = (
        f"import pathlib, signal, sys\nsignal.signal(signal.SIGINT, {answer})\n"
        f"pathlib.Path({str(ready)!r}).touch()\nwhile True: signal.sigtimedwait([], 1)"
    )
    lane = lanes.Lane(name="long", command=program(tmp_path, "long", code).partition("=")[2])
    running = lanes.Running(lane, folder=tmp_path, limit_s=3600)
    wait_until(ready.exists, "the lane", process=running.process)
    assert running.result() is None
    monkeypatch.setattr(lanes, "GRACE_S", 3600 if heeds else -1.0)
    running.limit_s = 0 if heeds else 1e-9
    if not heeds:
        running.over_limit = True
    wait_until(lambda: running.result() is not None, "its end")
    result = running.result()
    assert result is not None
    assert result.status == (0 if heeds else -signal.SIGKILL)
    assert not result.passed
    assert result.verdict.startswith("ended after its limit")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans on")
def test_an_end_from_outside_ends_grandchildren_that_hide(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    inner = (
        "import os, pathlib, signal; os.setsid(); "
        f"p = pathlib.Path({str(pid)!r}); p.with_suffix('.new').write_text(str(os.getpid())); "
        "p.with_suffix('.new').rename(p); signal.pause()"
    )
    code = (
        "import subprocess, sys, signal\n"
        f"subprocess.Popen([sys.executable, '-c', {inner!r}])\nsignal.pause()"
    )
    with start(program(tmp_path, "parent", code)) as process:
        wait_until(pid.exists, "the grandchild")
        hidden = psutil.Process(int(pid.read_text()))
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not hidden.is_running() or hidden.status() == psutil.STATUS_ZOMBIE
