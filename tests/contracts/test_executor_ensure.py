"""``ensure`` of every executor: interrupted at any request and repeated, it makes one complete job.

Each request that one undisturbed ``ensure`` sends is a boundary, at which the service refuses, the
answer is lost, or the caller is killed before or after the request. A caller that continues in
another process is a new executor.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from executors.base import ExecutorError, JobState, ReplicaHandle
from tests.emulators.interruptions import Interruption
from tests.executors.worlds import World, end_of, every_world, launch, wait_for

pytestmark = pytest.mark.processes

SECRET = {"TOKEN": "s3cr3t-81d0"}


def ensure(world: World, key: str, folder: Path) -> ReplicaHandle:
    """By a process of its own; the job leaves a line in a file of its own for each start."""
    return launch(world.executor(), "count", folder / key, key=key, secrets=SECRET)


def interrupted(world: World, how: Interruption, folder: Path) -> list[str]:
    """Keys of launches, each interrupted at another request, until none is left."""
    keys: list[str] = []
    while True:
        at, key = len(keys), f"run-{len(keys)}-1"
        world.interrupt(at, how)
        try:
            ensure(world, key, folder)
        except ExecutorError:
            assert world.restore() > at
        else:
            if world.restore() <= at:  # it ended before the interruption
                world.executor().cancel([h] if (h := world.executor().find(key)) else [])
                return keys
        keys.append(key)


@every_world("interrupt")
@pytest.mark.parametrize("how", Interruption)
def test_interrupted_at_any_request_and_repeated_it_makes_one_complete_job(
    world: World, how: Interruption, tmp_path: Path
) -> None:
    keys = interrupted(world, how, tmp_path)
    assert keys, "expected at least one request"
    for key in keys:
        handle = ensure(world, key, tmp_path)
        assert ensure(world, key, tmp_path) == handle
    for key in keys:
        wait_for((tmp_path / key).exists, f"{key} to start")
    assert world.incomplete() == []
    assert world.left_behind() == []
    executor = world.executor()
    handles = [handle for key in keys if (handle := executor.find(key)) is not None]
    assert len(handles) == len(keys)
    executor.cancel(handles)
    for handle in handles:
        end_of(executor, handle)
    for key in keys:
        assert (tmp_path / key).read_text() == "started\n", f"{key} started more than once"


@every_world("interrupt")
@pytest.mark.parametrize("how", [Interruption.KILLED_BEFORE, Interruption.KILLED_AFTER])
def test_one_that_is_abandoned_at_any_request_is_found_and_ended(
    world: World, how: Interruption, tmp_path: Path
) -> None:
    interrupted(world, how, tmp_path)
    executor = world.executor()
    executor.cancel(executor.live())
    wait_for(lambda: executor.live() == [], "all jobs to end")
    wait_for(lambda: world.left_behind() == [], "objects of ended jobs to go")


@every_world()
def test_repeated_by_many_callers_it_makes_one_job(world: World, tmp_path: Path) -> None:
    first = ensure(world, "run-0-1", tmp_path)
    wait_for((tmp_path / "run-0-1").exists, "the job to start")
    assert [ensure(world, "run-0-1", tmp_path) for _ in range(2)] == [first] * 2
    executor = world.executor()
    assert executor.find("run-0-1") == first
    assert executor.live() == [first]
    executor.cancel([first])
    end_of(executor, first)
    assert ensure(world, "run-0-1", tmp_path) == first
    assert executor.live() == []
    assert (tmp_path / "run-0-1").read_text() == "started\n"


@every_world()
def test_to_find_only_reads(world: World) -> None:
    executor = world.executor()
    assert executor.find("run-0-1") is None
    assert executor.live() == []


@every_world()
def test_a_job_that_has_ended_is_left_as_it_is(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 3, secrets=SECRET)
    status = end_of(executor, handle)
    assert launch(world.executor(), "exit", 3, secrets=SECRET) == handle
    assert executor.poll([handle])[0].state is JobState.ENDED
    assert end_of(executor, handle) == status
