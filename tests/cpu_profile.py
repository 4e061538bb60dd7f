"""CPU seconds of every test, with the processes that it starts: ``--cpu-profile FILE``.

``make test ARGS='--cpu-profile cpu.txt'`` writes one line for each test, the most expensive last:
CPU seconds, those of its child processes among them, and the test. CPU time is user and system
time. Unlike wall time, it hardly depends on what else the machine does. A fixture counts for the
first test that requests it. Processes whose parent died before them are not counted.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

OPTION = "--cpu-profile"
_SHOWN = 20


def register(config: pytest.Config) -> None:
    """Profile this process if the option was given; the controller also writes the result."""
    target = config.getoption(OPTION)
    if target is None:
        return
    config.pluginmanager.register(Meter(), "cpu-meter")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(Path(target)), "cpu-report")


def used_s() -> tuple[float, float]:
    """CPU seconds of this process until now, and of the processes below it."""
    children = 0.0
    me = psutil.Process()
    for process in me.children(recursive=True):
        try:
            children += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue  # its parent has reaped it, or will be seen without it
    times = os.times()
    return times.user + times.system, children + times.children_user + times.children_system


class Meter:
    """Measures each test of this process and sends the result with the test's last report."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._began = used_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when == "teardown":
            own, children = (now - then for now, then in zip(used_s(), self._began, strict=True))
            report.user_properties.append(("cpu_s", [own, max(0.0, children)]))
        return report


class Report:
    """Collects the measurements of all worker processes."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._tests: dict[str, tuple[float, float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cpu_s" and report.when == "teardown":
                self._tests[report.nodeid] = (float(value[0]), float(value[1]))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        costs = sorted((sum(cpu), cpu[1], name) for name, cpu in self._tests.items())
        lines = [f"{total:8.2f} {children:8.2f} {name}" for total, children, name in costs]
        self._target.write_text("\n".join([*lines, ""]))
        files: defaultdict[str, float] = defaultdict(float)
        for total, _, name in costs:
            files[name.partition("::")[0]] += total
        dearest = sorted(files.items(), key=lambda item: -item[1])[:_SHOWN]
        terminalreporter.section("CPU seconds")
        terminalreporter.line(
            f"{sum(cost[0] for cost in costs):.0f} in {len(costs)} tests, of them "
            f"{sum(cost[1] for cost in costs):.0f} in child processes"
        )
        for name, total in dearest:
            terminalreporter.line(f"{total:8.1f} {name}")
