"""How jobs end, and what is said of it: exit codes and causes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from executors.base import Cause, JobState
from tests.executors.worlds import (
    LIMIT_S,
    World,
    end_of,
    every_world,
    is_gone,
    launch,
    number_in,
    wait_for,
)

pytestmark = pytest.mark.processes


@every_world()
def test_a_clean_end_is_done(world: World) -> None:
    executor = world.executor()
    status = end_of(executor, launch(executor, "exit", 0))
    assert (status.cause, status.exit_code) == (Cause.DONE, 0)


@every_world()
@pytest.mark.parametrize("code", [1, 78])
def test_an_error_is_one(world: World, code: int) -> None:
    executor = world.executor()
    status = end_of(executor, launch(executor, "exit", code, "the reason"))
    assert status.cause is Cause.ERROR
    assert status.message


@every_world("exit_code")
@pytest.mark.parametrize("code", [1, 75, 78])
def test_an_error_carries_its_exit_code(world: World, code: int) -> None:
    executor = world.executor()
    assert end_of(executor, launch(executor, "exit", code)).exit_code == code


@every_world()
def test_a_missing_module_is_an_error(world: World) -> None:
    executor = world.executor()
    (handle,) = executor.launch_replicas(1, "no_such_module_at_all")
    assert end_of(executor, handle).cause is Cause.ERROR
    assert any("no_such_module_at_all" in line.text for line in executor.logs(handle))


@every_world()
def test_cancel_ends_it_and_cancel_again_is_no_error(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    pid = number_in(tmp_path / "up")
    executor.cancel([handle])
    executor.cancel([handle])
    status = end_of(executor, handle)
    wait_for(lambda: is_gone(pid), "the process to end")
    executor.cancel([handle])
    assert end_of(executor, handle) == status


@every_world("cancel_is_told")
def test_a_cancelled_job_is_cancelled(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED


@every_world()
def test_many_are_cancelled_and_the_dead_among_them_do_not_matter(
    world: World, tmp_path: Path
) -> None:
    executor = world.executor()
    over = launch(executor, "exit", 0, key="run-0-1")
    end_of(executor, over)
    living = [launch(executor, "wait", tmp_path / f"{n}", key=f"run-{n}-1") for n in (1, 2)]
    pids = [number_in(tmp_path / f"{n}") for n in (1, 2)]
    executor.cancel([over, *living])
    assert all(s.state is JobState.ENDED for s in executor.collect([over, *living], LIMIT_S))
    assert end_of(executor, over).cause is Cause.DONE
    wait_for(lambda: all(is_gone(pid) for pid in pids), "both processes to end")


@every_world()
def test_one_that_is_deaf_to_sigterm_ends_too(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "deaf", tmp_path / "up")
    pid = number_in(tmp_path / "up")
    executor.cancel([handle])
    end_of(executor, handle)
    wait_for(lambda: is_gone(pid), "the process to end")


@every_world("deadline")
def test_its_deadline_ends_it(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", timeout_s=4)
    number_in(tmp_path / "up")
    (status,) = executor.poll([handle])
    if status.state is not JobState.ENDED:
        assert status.deadline_wall_s is not None
        assert status.deadline_wall_s < time.time() + 60
    status = end_of(executor, handle)
    assert status.cause is Cause.DEADLINE, status


@every_world("deadline")
def test_one_that_ends_before_its_deadline_is_done(world: World) -> None:
    executor = world.executor()
    status = end_of(executor, launch(executor, "exit", 0, timeout_s=60))
    assert status.cause is Cause.DONE


@every_world("deadline")
def test_without_a_deadline_it_gets_the_longest(world: World, tmp_path: Path) -> None:
    """Never a shorter default of the backend's own, such as 30 minutes."""
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    (status,) = executor.poll([handle])
    longest = executor.capabilities.max_lifetime_s
    if longest is None:
        assert status.deadline_wall_s is None
    else:
        assert status.deadline_wall_s is not None
        assert status.deadline_wall_s > time.time() + longest - 600
    executor.cancel([handle])
    end_of(executor, handle)


@every_world("preempt")
def test_a_preempted_job_is_preempted(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", spot=executor.capabilities.spot)
    pid = number_in(tmp_path / "up")
    world.preempt(handle)
    status = end_of(executor, handle)
    assert status.cause is Cause.PREEMPTED, status
    wait_for(lambda: is_gone(pid), "the process to end")


@every_world("oom")
def test_want_of_memory_is_told(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    world.oom(handle)
    status = end_of(executor, handle)
    assert status.cause is Cause.OUT_OF_MEMORY, status


@every_world("lose")
def test_a_job_nobody_knows_any_more_is_lost(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    kept = launch(executor, "wait", tmp_path / "kept", key="run-0-1")
    gone = launch(executor, "wait", tmp_path / "gone", key="run-1-1")
    number_in(tmp_path / "gone")
    number_in(tmp_path / "kept")
    world.lose(gone)
    here, away = executor.poll([kept, gone])
    assert here.state is JobState.RUNNING
    assert (away.state, away.cause) == (JobState.ENDED, Cause.LOST)
    assert executor.live() == [kept]
    executor.cancel([gone, kept])
    end_of(executor, kept)
