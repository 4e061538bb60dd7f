"""The next poll or cancel kills the remaining processes of a job whose shim was killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from executors.base import Cause
from executors.local.executor import LocalProcessExecutor
from tests.executors.harnesses import LIMIT_S, config, is_gone, launch, number_in, wait_for

pytestmark = pytest.mark.processes


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[LocalProcessExecutor]:
    made = LocalProcessExecutor(config(tmp_path, grace_s=0.2))
    yield made
    left = made.live()
    made.cancel(left)
    made.collect(left, LIMIT_S)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize(
    ("seen_by", "clock_set_back_s"), [("poll", 0), ("cancel", 0), ("poll", 3600)]
)
def test_a_killed_shim_leaves_no_session_of_its_replica(
    executor: LocalProcessExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seen_by: str,
    clock_set_back_s: int,
) -> None:
    paths = [tmp_path / name for name in ("main", "rank0", "rank1")]
    handle = launch(executor, "deaf-sessions", *paths)
    other = launch(executor, "wait", tmp_path / "other", key="run-1-1")
    pids = [number_in(path) for path in paths]
    record = executor.root / handle.launch_key / "handle.json"
    shim = int(json.loads(record.read_text())["pid"])
    os.kill(shim, signal.SIGKILL)
    wait_for(lambda: is_gone(shim) and is_gone(pids[0]), "the shim and the replica to end")
    assert not is_gone(pids[1])
    boot_time = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time - clock_set_back_s)
    if seen_by == "poll":
        assert executor.poll([handle])[0].cause is Cause.LOST
    else:
        executor.cancel([handle])
    for pid in pids:
        wait_for(lambda pid=pid: is_gone(pid), "every process of the replica to end")
    assert not is_gone(number_in(tmp_path / "other")) and executor.live() == [other]
