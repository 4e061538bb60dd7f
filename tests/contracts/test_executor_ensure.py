"""Launching is idempotent: interrupted at any request and repeated, it creates one complete job.

At each request of a launch the service refuses, the response is lost, or the caller is killed
before or after the request. A caller that continues in another process is a new executor.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from executors.base import ExecutorError, JobState, ReplicaHandle
from tests.emulators.interruptions import Interruption
from tests.executors.harnesses import (
    Harness,
    end_of,
    every_harness,
    launch,
    wait_for,
    wait_for_text,
)

pytestmark = pytest.mark.processes

SECRET = {"TOKEN": "s3cr3t-81d0"}
MOST_LAUNCHES = 100


def ensure(harness: Harness, key: str, folder: Path) -> ReplicaHandle:
    """Launch with a new executor. The job appends a line to the file ``key`` at each start."""
    return launch(harness.executor(), "count", folder / key, key=key, secrets=SECRET)


def interrupted(harness: Harness, how: Interruption, folder: Path) -> list[str]:
    """Launch once per request, each launch interrupted at another request, and return the keys."""
    keys: list[str] = []
    at = 0
    while True:
        key = f"run-{len(keys)}-1"
        harness.interrupt(at, how)
        try:
            ensure(harness, key, folder)
        except ExecutorError:
            # On a busy machine an earlier request can have no answer in time.
            at += harness.restore() > at
        else:
            if harness.restore() <= at:  # the launch sent fewer requests
                harness.executor().cancel([h] if (h := harness.executor().find(key)) else [])
                return keys
            at += 1
        keys.append(key)
        assert len(keys) < MOST_LAUNCHES


@every_harness("interrupt")
@pytest.mark.parametrize("how", Interruption)
def test_interrupted_and_repeated_launch_creates_one_complete_job(
    harness: Harness, how: Interruption, tmp_path: Path
) -> None:
    keys = interrupted(harness, how, tmp_path)
    assert keys, "expected at least one request"
    for key in keys:
        handle = ensure(harness, key, tmp_path)
        assert ensure(harness, key, tmp_path) == handle
    for key in keys:
        wait_for_text(tmp_path / key)
    assert harness.incomplete() == []
    assert harness.left_behind() == []
    executor = harness.executor()
    handles = [handle for key in keys if (handle := executor.find(key)) is not None]
    assert len(handles) == len(keys)
    executor.cancel(handles)
    for handle in handles:
        end_of(executor, handle)
    for key in keys:
        assert (tmp_path / key).read_text() == "started\n", f"{key} started more than once"


@every_harness("interrupt")
@pytest.mark.parametrize("how", [Interruption.KILLED_BEFORE, Interruption.KILLED_AFTER])
def test_abandoned_launch_is_found_and_ended(
    harness: Harness, how: Interruption, tmp_path: Path
) -> None:
    interrupted(harness, how, tmp_path)
    executor = harness.executor()
    executor.cancel(executor.live())
    wait_for(lambda: executor.live() == [], "all jobs to end")
    wait_for(lambda: harness.left_behind() == [], "objects of ended jobs to go")


@every_harness()
def test_repeated_launch_creates_one_job(harness: Harness, tmp_path: Path) -> None:
    first = ensure(harness, "run-0-1", tmp_path)
    wait_for_text(tmp_path / "run-0-1")
    assert [ensure(harness, "run-0-1", tmp_path) for _ in range(2)] == [first] * 2
    executor = harness.executor()
    assert executor.find("run-0-1") == first
    assert executor.live() == [first]
    executor.cancel([first])
    end_of(executor, first)
    assert ensure(harness, "run-0-1", tmp_path) == first
    assert executor.live() == []
    assert (tmp_path / "run-0-1").read_text() == "started\n"


@every_harness()
def test_find_has_no_effects(harness: Harness) -> None:
    executor = harness.executor()
    assert executor.find("run-0-1") is None
    assert executor.live() == []


@every_harness()
def test_ended_job_is_not_launched_again(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 3, secrets=SECRET)
    status = end_of(executor, handle)
    assert launch(harness.executor(), "exit", 3, secrets=SECRET) == handle
    assert executor.poll([handle])[0].state is JobState.ENDED
    assert end_of(executor, handle) == status
