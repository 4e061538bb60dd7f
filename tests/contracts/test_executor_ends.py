"""Ends of jobs: exit codes and causes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from executors.base import Cause, JobState
from tests.executors.harnesses import (
    LIMIT_S,
    Harness,
    end_of,
    every_harness,
    is_gone,
    launch,
    number_in,
    wait_for,
)

pytestmark = pytest.mark.processes


@every_harness()
def test_exit_code_0_is_done(harness: Harness) -> None:
    executor = harness.executor()
    status = end_of(executor, launch(executor, "exit", 0))
    assert (status.cause, status.exit_code) == (Cause.DONE, 0)


@every_harness()
@pytest.mark.parametrize("code", [1, 78])
def test_nonzero_exit_code_is_an_error(harness: Harness, code: int) -> None:
    executor = harness.executor()
    status = end_of(executor, launch(executor, "exit", code, "the reason"))
    assert status.cause is Cause.ERROR
    assert status.message


@every_harness("exit_code")
@pytest.mark.parametrize("code", [1, 75, 78])
def test_error_has_its_exit_code(harness: Harness, code: int) -> None:
    executor = harness.executor()
    assert end_of(executor, launch(executor, "exit", code)).exit_code == code


@every_harness()
def test_missing_module_is_an_error(harness: Harness) -> None:
    executor = harness.executor()
    (handle,) = executor.launch_replicas(1, "no_such_module_at_all")
    assert end_of(executor, handle).cause is Cause.ERROR
    assert any("no_such_module_at_all" in line.text for line in executor.logs(handle))


@every_harness()
def test_cancel_ends_a_job_and_is_idempotent(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    pid = number_in(tmp_path / "up")
    executor.cancel([handle])
    executor.cancel([handle])
    status = end_of(executor, handle)
    wait_for(lambda: is_gone(pid), "the process to end")
    executor.cancel([handle])
    assert end_of(executor, handle) == status


@every_harness("cancel_has_cause")
def test_cause_of_a_cancelled_job(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED


@every_harness()
def test_cancel_of_many_ignores_ended_jobs(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    ended = launch(executor, "exit", 0, key="run-0-1")
    end_of(executor, ended)
    running = [launch(executor, "wait", tmp_path / f"{n}", key=f"run-{n}-1") for n in (1, 2)]
    pids = [number_in(tmp_path / f"{n}") for n in (1, 2)]
    executor.cancel([ended, *running])
    assert all(s.state is JobState.ENDED for s in executor.collect([ended, *running], LIMIT_S))
    assert end_of(executor, ended).cause is Cause.DONE
    wait_for(lambda: all(is_gone(pid) for pid in pids), "both processes to end")


@every_harness()
def test_job_that_ignores_sigterm_is_killed(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "deaf", tmp_path / "up")
    pid = number_in(tmp_path / "up")
    executor.cancel([handle])
    end_of(executor, handle)
    wait_for(lambda: is_gone(pid), "the process to end")


@every_harness("deadline")
def test_deadline_ends_a_job(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up", timeout_s=2)

    def has_ended() -> bool:
        return executor.poll([handle])[0].state is JobState.ENDED

    wait_for(lambda: (tmp_path / "up").exists() or has_ended(), "the start")
    (status,) = executor.poll([handle])
    if status.state is not JobState.ENDED:
        assert status.deadline_wall_s is not None
        assert status.deadline_wall_s < time.time() + 60
    status = end_of(executor, handle)
    assert status.cause is Cause.DEADLINE, status


@every_harness("deadline")
def test_job_that_ends_before_its_deadline_is_done(harness: Harness) -> None:
    executor = harness.executor()
    status = end_of(executor, launch(executor, "exit", 0, timeout_s=60))
    assert status.cause is Cause.DONE


@every_harness("deadline")
def test_default_deadline_is_the_longest(harness: Harness, tmp_path: Path) -> None:
    """Shorter defaults of backends, such as 30 minutes, are overridden."""
    executor = harness.executor()
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


@every_harness("preempt")
def test_cause_of_a_preempted_job(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up", spot=executor.capabilities.spot)
    pid = number_in(tmp_path / "up")
    harness.preempt(handle)
    status = end_of(executor, handle)
    assert status.cause is Cause.PREEMPTED, status
    wait_for(lambda: is_gone(pid), "the process to end")


@every_harness("oom")
def test_cause_of_a_job_that_was_out_of_memory(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    harness.oom(handle)
    status = end_of(executor, handle)
    assert status.cause is Cause.OUT_OF_MEMORY, status


@every_harness("lose")
def test_job_unknown_to_the_backend_is_lost(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    kept = launch(executor, "wait", tmp_path / "kept", key="run-0-1")
    gone = launch(executor, "wait", tmp_path / "gone", key="run-1-1")
    number_in(tmp_path / "gone")
    number_in(tmp_path / "kept")
    harness.lose(gone)
    running, lost = executor.poll([kept, gone])
    assert running.state is JobState.RUNNING
    assert (lost.state, lost.cause) == (JobState.ENDED, Cause.LOST)
    assert executor.live() == [kept]
    executor.cancel([gone, kept])
    end_of(executor, kept)
