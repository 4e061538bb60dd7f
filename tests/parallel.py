"""How ``pytest -n`` divides the tests between worker processes.

A work unit is one test file, or the part of a file that belongs to one stage, so fixtures with
module scope are set up once. Workers take units from one queue in the order of the collection
(``tests/conftest.py`` sorts it by stage), so each worker runs browser tests last, and tests that
start processes between quick ones. Within a stage the longest files come first, so that the last
ones are short. A file takes the ``minutes`` of its marker ``slow``, and the mean duration of a test
for each of its other tests, times their ``weight``.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

STAGES = ("browser", "processes")
"""Markers and fixtures that postpone a test, the last stage first."""

Stage = tuple[int, bool]
Part = tuple[Stage, str]
"""The tests of a file in one stage."""

MERGED: Sequence[Stage] = ((0, False), (1, False))
"""The stages of quick tests and of tests that start processes, without transactions."""

TEST_S = 0.2
"""The mean duration of a test."""

BYTES_PER_WORKER = 2_500_000_000
"""A worker with torch and the servers and replicas that its tests start."""

_PR_SET_PDEATHSIG = 1


def stage(item: pytest.Item) -> Stage:
    """The order of tests: quick ones, tests that start processes, browser tests.

    Playwright keeps an event loop in the main thread for the rest of the session, so no test after
    the first browser test can call ``asyncio.run``. In each of the three, tests with transactions
    follow the other tests: they leave the database empty, without the rows that migrations create.
    """
    fixtures = set(getattr(item, "fixturenames", ()))
    names = {mark.name for mark in item.iter_markers()} | fixtures
    slow = next((len(STAGES) - n for n, name in enumerate(STAGES) if name in names), 0)
    marker = item.get_closest_marker("django_db")
    transactional = marker is not None and bool(marker.kwargs.get("transaction"))
    return slow, transactional or not fixtures.isdisjoint(("transactional_db", "live_server"))


def minutes(item: pytest.Item) -> float:
    """Return how long its file takes, from the marker ``slow``; 0 if it has none."""
    marker = item.get_closest_marker("slow")
    return float(marker.kwargs.get("minutes", 0)) if marker else 0.0


def weight(item: pytest.Item) -> int:
    """Return as how many other tests it takes, from the marker ``weight``; 1 without it."""
    marker = item.get_closest_marker("weight")
    return int(marker.args[0]) if marker else 1


def sort_by_stage(items: list[pytest.Item]) -> None:
    """By stage, then by the duration of the file in the stage; a file's own order is kept.

    Quick files and files that start processes are merged at equal shares of their durations, so
    that some workers compute while others wait.
    """
    keys = {item: (stage(item), file_of(item.nodeid)) for item in items}
    slow_s: defaultdict[Part, float] = defaultdict(float)
    others_s: defaultdict[Part, float] = defaultdict(float)
    for item, key in keys.items():
        slow_s[key] = max(slow_s[key], 60 * minutes(item))
        others_s[key] += 0.0 if minutes(item) else TEST_S * weight(item)
    duration_s = {key: slow_s[key] + others_s[key] for key in slow_s}
    before_s: defaultdict[Stage, float] = defaultdict(float)
    ends_s: dict[Part, float] = {}
    for key in sorted(duration_s, key=lambda key: (-duration_s[key], key)):
        before_s[key[0]] += duration_s[key]
        ends_s[key] = before_s[key[0]]

    def place(item: pytest.Item) -> tuple[Stage, float, Part]:
        key = keys[item]
        own = key[0]
        begins_s = ends_s[key] - duration_s[key]
        return MERGED[0] if own in MERGED else own, begins_s / before_s[own], key

    items.sort(key=place)


def collect_from_another_folder(config: pytest.Config) -> None:
    """Let each worker begin the collection elsewhere, if it collects all tests.

    Workers that import the same modules at the same time compile each of them, unless one compiled
    it before. In a new clone that is half of the CPU of a collection. :func:`sort_by_stage` gives
    the tests one order.
    """
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    worker = int(config.workerinput["workerid"].removeprefix("gw"))  # type: ignore[attr-defined]
    number = config.workerinput["workercount"]  # type: ignore[attr-defined]
    (folder,) = config.getini("testpaths")
    config.args[:] = rotated(config.rootpath / folder, worker / number)


def rotated(folder: Path, share: float) -> list[str]:
    """The entries of ``folder`` that pytest collects, from the one where ``share`` of its modules
    are before."""
    modules = {
        str(entry): sum(1 for _ in entry.rglob("test_*.py")) if entry.is_dir() else 1
        for entry in sorted(folder.iterdir())
        if entry.is_dir() or entry.match("test_*.py")
    }
    entries = [entry for entry, count in modules.items() if count]
    before = itertools.accumulate((modules[entry] for entry in entries), initial=0)
    start = sum(count < share * sum(modules.values()) for count in before) % len(entries)
    return entries[start:] + entries[:start]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def units(nodeids: Iterable[str]) -> dict[str, str]:
    """Test -> its unit. Neighbours in the collection from the same file share a unit."""
    result: dict[str, str] = {}
    for number, (file, group) in enumerate(itertools.groupby(nodeids, key=file_of)):
        result.update(dict.fromkeys(group, f"{number} {file}"))
    return result


class FileScheduling(LoadScopeScheduling):
    """Hand out files in the order of the collection."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._units: dict[str, str] = {}

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        if not self._units:
            self._units = units(collection)

    def remove_node(self, node: Any) -> str | None:
        """Put back the units of a worker that died, except for the test that it was running."""
        workload = self.assigned_work.pop(node)
        pending = [
            (unit, nodeid)
            for unit in workload.values()
            for nodeid, completed in unit.items()
            if not completed
        ]
        if not pending:
            return None
        unit, crashed = pending[0]
        unit[crashed] = True
        left = {name: unit for name, unit in workload.items() if not all(unit.values())}
        for name in reversed(left):
            self.workqueue[name] = left[name]
            self.workqueue.move_to_end(name, last=False)
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _split_scope(self, nodeid: str) -> str:
        return self._units[nodeid]


def worker_count() -> int:
    """For ``-n auto``: one worker more than cores, fewer where memory is short.

    Tests that start processes or a browser wait most of the time.
    """
    import psutil

    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores + 1, psutil.virtual_memory().available // BYTES_PER_WORKER))


def end_with_controller() -> None:
    """Have Linux kill this worker when the controller dies; its children end with it in turn."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent or parent == 1:
        os._exit(1)
