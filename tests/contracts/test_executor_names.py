"""Launch keys: one key is one job, whoever launches it and however often, and anybody finds it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from executors.base import ReplicaHandle, RetryLater, ServerlessExecutor
from tests.executors.worlds import LIMIT_S, World, end_of, every_world, launch, wait_for

pytestmark = pytest.mark.processes


def starts(path: Path) -> int:
    return path.read_text().count("started") if path.exists() else 0


def cleaned_up(executor: ServerlessExecutor, key: str) -> ReplicaHandle:
    """What the reaper does where a backend knows no unique names: of the jobs of one key the one
    that ``find`` gives survives."""
    survivor = executor.find(key)
    assert survivor is not None
    others = [job for job in executor.live() if job.launch_key == key and job != survivor]
    if executor.capabilities.unique_names:
        assert others == []
    executor.cancel(others)
    executor.collect(others, LIMIT_S)
    assert executor.find(key) == survivor
    return survivor


def ended(executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
    executor.cancel([handle])
    end_of(executor, handle)


@every_world()
def test_another_instance_finds_it_by_its_key(world: World, tmp_path: Path) -> None:
    handle = launch(world.executor(), "wait", tmp_path / "up")
    other = world.executor()
    assert other.find("run-0-1") == handle
    assert other.find("run-0-2") is None
    ended(other, handle)
    assert world.executor().find("run-0-1") == handle


@every_world()
def test_a_key_that_is_part_of_another_is_another(world: World) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0, key="run-1-10")
    assert executor.find("run-1-1") is None
    assert executor.find("run-1") is None
    end_of(executor, handle)


@every_world()
def test_the_same_key_again_is_the_same_job(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    first = launch(executor, "count", tmp_path / "starts")
    wait_for(lambda: starts(tmp_path / "starts"), "the start")
    assert launch(world.executor(), "count", tmp_path / "starts") == first
    ended(executor, first)
    assert launch(executor, "count", tmp_path / "starts") == first
    assert end_of(executor, first).ended_wall_s is not None
    assert executor.live() == []
    assert starts(tmp_path / "starts") == 1


@every_world()
def test_one_key_launched_at_once_is_one_job(world: World, tmp_path: Path) -> None:
    def race(_: int) -> ReplicaHandle:
        return launch(world.executor(), "count", tmp_path / "starts")

    with ThreadPoolExecutor(4) as pool:
        handles = list(pool.map(race, range(4)))
    executor = world.executor()
    survivor = cleaned_up(executor, "run-0-1")
    if executor.capabilities.unique_names:
        assert handles == [survivor] * 4
        wait_for(lambda: starts(tmp_path / "starts"), "the start")
        assert starts(tmp_path / "starts") == 1
    assert [job for job in executor.live() if job.launch_key == "run-0-1"] == [survivor]
    ended(executor, survivor)


@every_world()
def test_a_new_attempt_is_a_new_job(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    first = launch(executor, "wait", tmp_path / "first", key="run-0-1")
    ended(executor, first)
    second = launch(executor, "exit", 0, key="run-0-2")
    assert second != first
    assert end_of(executor, second).cause == "done"
    assert executor.find("run-0-1") == first
    assert executor.find("run-0-2") == second


@every_world()
def test_a_batch_launched_again_finds_what_it_started(world: World, tmp_path: Path) -> None:
    from executors.base import ReplicaSpec
    from tests.executors.worlds import stub_env

    executor = world.executor()
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


@every_world("impatient", "server")
def test_a_launch_whose_answer_was_not_waited_for_is_found_again(
    world: World, tmp_path: Path
) -> None:
    world.slow(4)
    with pytest.raises(RetryLater):
        launch(world.impatient(), "count", tmp_path / "starts")
    world.slow(0)
    executor = world.executor()
    handle = launch(executor, "count", tmp_path / "starts")
    survivor = cleaned_up(executor, "run-0-1")
    if executor.capabilities.unique_names:
        assert survivor == handle
    wait_for(lambda: starts(tmp_path / "starts"), "the start")
    assert [job for job in executor.live() if job.launch_key == "run-0-1"] == [survivor]
    ended(executor, survivor)


@every_world()
def test_the_living_are_those_of_our_deployment(world: World, tmp_path: Path) -> None:
    ours, theirs = world.executor(), world.executor(deployment="another")
    mine = launch(ours, "wait", tmp_path / "mine", key="run-0-1")
    other = launch(theirs, "wait", tmp_path / "other", key="other-0-1")
    over = launch(ours, "exit", 0, key="run-1-1")
    end_of(ours, over)
    assert world.executor().live() == [mine]
    assert world.executor(deployment="another").live() == [other]
    ended(ours, mine)
    ended(theirs, other)
    assert ours.live() == []
