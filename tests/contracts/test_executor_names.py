"""Launch keys: a key identifies one job, for all executors and any number of launches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from executors.base import ReplicaHandle, ReplicaSpec, RetryLater
from executors.executor import Executor
from tests.executors.harnesses import (
    LIMIT_S,
    Harness,
    end_of,
    every_harness,
    launch,
    stub_env,
    wait_for,
)

pytestmark = pytest.mark.processes


def starts(path: Path) -> int:
    return path.read_text().count("started") if path.exists() else 0


def end_duplicates(executor: Executor, key: str) -> ReplicaHandle:
    """End all jobs of ``key`` except the one that ``find`` returns, as the reaper does.

    Backends with unique names have no duplicates.
    """
    survivor = executor.find(key)
    assert survivor is not None
    others = [job for job in executor.live() if job.launch_key == key and job != survivor]
    if executor.capabilities.unique_names:
        assert others == []
    executor.cancel(others)
    executor.collect(others, LIMIT_S)
    assert executor.find(key) == survivor
    return survivor


def end(executor: Executor, handle: ReplicaHandle) -> None:
    executor.cancel([handle])
    end_of(executor, handle)


@every_harness()
def test_another_executor_finds_the_job_by_its_key(harness: Harness, tmp_path: Path) -> None:
    handle = launch(harness.executor(), "wait", tmp_path / "up")
    other = harness.executor()
    assert other.find("run-0-1") == handle
    assert other.find("run-0-2") is None
    end(other, handle)
    assert harness.executor().find("run-0-1") == handle


@every_harness()
def test_prefix_of_a_key_is_another_key(harness: Harness) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 0, key="run-1-10")
    assert executor.find("run-1-1") is None
    assert executor.find("run-1") is None
    end_of(executor, handle)


@every_harness()
def test_repeated_key_is_the_same_job(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    first = launch(executor, "count", tmp_path / "starts")
    wait_for(lambda: starts(tmp_path / "starts"), "the start")
    assert launch(harness.executor(), "count", tmp_path / "starts") == first
    end(executor, first)
    assert launch(executor, "count", tmp_path / "starts") == first
    assert end_of(executor, first).ended_wall_s is not None
    assert executor.live() == []
    assert starts(tmp_path / "starts") == 1


@every_harness()
def test_concurrent_launches_of_a_key_create_one_job(harness: Harness, tmp_path: Path) -> None:
    def race(_: int) -> ReplicaHandle:
        return launch(harness.executor(), "count", tmp_path / "starts")

    with ThreadPoolExecutor(4) as pool:
        handles = list(pool.map(race, range(4)))
    executor = harness.executor()
    survivor = end_duplicates(executor, "run-0-1")
    if executor.capabilities.unique_names:
        assert handles == [survivor] * 4
        wait_for(lambda: starts(tmp_path / "starts"), "the start")
        assert starts(tmp_path / "starts") == 1
    assert [job for job in executor.live() if job.launch_key == "run-0-1"] == [survivor]
    end(executor, survivor)


@every_harness()
def test_a_new_attempt_is_a_new_job(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    first = launch(executor, "wait", tmp_path / "first", key="run-0-1")
    end(executor, first)
    second = launch(executor, "exit", 0, key="run-0-2")
    assert second != first
    assert end_of(executor, second).cause == "done"
    assert executor.find("run-0-1") == first
    assert executor.find("run-0-2") == second


@every_harness()
def test_repeated_batch_finds_its_running_job(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    one = launch(executor, "count", tmp_path / "starts", key="run-1-1", replica=1)
    wait_for(lambda: starts(tmp_path / "starts"), "the start")
    handles = executor.launch_replicas(
        3,
        "replica_stub",
        {"args": ["count", tmp_path / "starts"]},
        specs=[ReplicaSpec(launch_key=f"run-{n}-1", replica=n) for n in range(3)],
        env=stub_env(),
    )
    assert handles[1] == one
    wait_for(lambda: starts(tmp_path / "starts") >= 3, "three starts")
    executor.cancel(handles)
    executor.collect(handles, LIMIT_S)
    assert starts(tmp_path / "starts") == 3


@every_harness("impatient", "server")
def test_launch_that_timed_out_is_found_again(harness: Harness, tmp_path: Path) -> None:
    harness.slow(4)
    with pytest.raises(RetryLater):
        launch(harness.impatient(), "count", tmp_path / "starts")
    harness.slow(0)
    executor = harness.executor()
    handle = launch(executor, "count", tmp_path / "starts")
    survivor = end_duplicates(executor, "run-0-1")
    if executor.capabilities.unique_names:
        assert survivor == handle
    wait_for(lambda: starts(tmp_path / "starts"), "the start")
    assert [job for job in executor.live() if job.launch_key == "run-0-1"] == [survivor]
    end(executor, survivor)


@every_harness()
def test_live_returns_jobs_of_the_deployment(harness: Harness, tmp_path: Path) -> None:
    own, foreign = harness.executor(), harness.executor(deployment="another")
    running = launch(own, "wait", tmp_path / "own", key="run-0-1")
    other = launch(foreign, "wait", tmp_path / "other", key="other-0-1")
    ended = launch(own, "exit", 0, key="run-1-1")
    end_of(own, ended)
    assert harness.executor().live() == [running]
    assert harness.executor(deployment="another").live() == [other]
    end(own, running)
    end(foreign, other)
    assert own.live() == []
