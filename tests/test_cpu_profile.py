"""The option ``--cpu-profile``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import cpu_profile

BURN = "import time\nwhile time.process_time() < 0.2: pass"
COUNTED_S = 0.2 - 1.5 / os.sysconf("SC_CLK_TCK")
"""Less than BURN uses: the kernel rounds user and system time down to a tick each."""


class Terminal:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def section(self, title: str) -> None:
        self.lines.append(title)

    line = section


@pytest.mark.processes
def test_child_processes_count_while_they_run_and_after_their_end() -> None:
    before = cpu_profile.used_s()[1]
    with subprocess.Popen(
        [sys.executable, "-S", "-c", f"{BURN}\nprint(flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_profile.used_s()[1] - before > COUNTED_S
        process.communicate(b"\n")
    assert cpu_profile.used_s()[1] - before > COUNTED_S


def test_the_file_has_the_most_expensive_test_last(tmp_path: Path) -> None:
    report, terminal = cpu_profile.Report(tmp_path / "cpu.txt"), Terminal()
    costs = {"a.py::slow": [1.0, 4.0], "b.py::one": [1.5, 0.0], "b.py::two": [2.0, 0.0]}
    for name, cpu in costs.items():
        for when in ("setup", "teardown"):
            one: Any = pytest.TestReport(name, ("", 0, ""), {}, "passed", None, when)  # type: ignore[arg-type]
            one.user_properties = [("cpu_s", cpu)] if when == "teardown" else []
            report.pytest_runtest_logreport(one)
    report.pytest_terminal_summary(terminal)
    assert (tmp_path / "cpu.txt").read_text().splitlines() == [
        "    1.50     0.00 b.py::one",
        "    2.00     0.00 b.py::two",
        "    5.00     4.00 a.py::slow",
    ]
    assert terminal.lines == [
        "CPU seconds",
        "8 in 3 tests, of them 4 in child processes",
        "     5.0 a.py",
        "     3.5 b.py",
    ]
