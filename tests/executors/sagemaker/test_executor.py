"""SageMaker's jobs beyond the suite of every executor: spot, machines, names, logs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executors.base import (
    Cause,
    JobState,
    LaunchRefused,
    NeedsPerson,
    NoCapacity,
    ReplicaHandle,
    ReplicaSpec,
    RetryLater,
)
from executors.sagemaker.executor import SageMakerExecutor
from tests.emulators.faults import Fault
from tests.executors.bundles import code_in
from tests.executors.sagemaker.world import REGION, SageMakerWorld
from tests.executors.worlds import end_of, launch, number_in, stub_env, text_of, wait_for

pytestmark = pytest.mark.processes


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SageMakerWorld]:
    with SageMakerWorld(tmp_path / "world") as opened:
        yield opened


def described(world: SageMakerWorld, handle: ReplicaHandle) -> dict[str, Any]:
    return world.server.jobs.describe(REGION, {"TrainingJobName": handle.data["name"]})


def state_of(executor: SageMakerExecutor, handle: ReplicaHandle) -> tuple[JobState, Cause | None]:
    (status,) = executor.poll([handle])
    return status.state, status.cause


# Spot


def test_an_interrupted_job_is_stopped_and_stays_stopped(
    world: SageMakerWorld, tmp_path: Path
) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", spot=True, secrets={"TOKEN": "s3cr3t-1"})
    number_in(tmp_path / "up")
    assert state_of(executor, handle) == (JobState.RUNNING, None)
    world.preempt(handle)
    status = end_of(executor, handle)
    assert (status.cause, status.message) == (Cause.PREEMPTED, "the spot instance was interrupted")
    assert world.server.secrets.kept == {}
    (tmp_path / "up").unlink()
    world.server.give_machines()
    assert described(world, handle)["TrainingJobStatus"] == "Stopped"
    for other in (executor, world.executor()):
        (again,) = other.poll([handle])
        assert (again.state, again.cause) == (JobState.ENDED, Cause.PREEMPTED)
    assert again.billed_s is not None
    assert executor.live() == []
    assert not (tmp_path / "up").exists()


def test_an_interrupted_spot_job_has_ended_only_when_it_no_longer_uses_the_quota(
    world: SageMakerWorld, tmp_path: Path
) -> None:
    world.server.limit("ml.m5.large for spot training job usage", 1)
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", spot=True)
    number_in(tmp_path / "up")
    world.server.hold_stopping()
    world.preempt(handle)
    wait_for(lambda: described(world, handle)["SecondaryStatus"] == "Interrupted", "the spot end")
    phases = []
    for _ in range(3):
        (status,) = executor.poll([handle])
        assert (status.state, status.cause) == (JobState.RUNNING, None)
        assert "interrupted" in status.message
        phases.append(status.phase)
    assert phases == ["Interrupted", "Stopping", "Stopping"]  # the first poll stops the job
    with pytest.raises(NoCapacity, match="is 1 Instances, with current utilization of 1"):
        launch(executor, "exit", 0, key="run-0-2", spot=True)
    world.server.hold_stopping(False)
    status = end_of(executor, handle)
    assert status.cause is Cause.PREEMPTED
    assert end_of(executor, launch(executor, "exit", 0, key="run-0-2", spot=True)).cause == "done"


def test_an_interrupted_job_is_stopped_even_when_the_first_request_is_lost(
    world: SageMakerWorld, tmp_path: Path
) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", spot=True)
    number_in(tmp_path / "up")
    world.preempt(handle)
    wait_for(lambda: described(world, handle)["SecondaryStatus"] == "Interrupted", "the spot end")
    world.server.faults.rule = lambda name: "unavailable" if name == "StopTrainingJob" else ""
    assert executor.poll([handle])[0].state is JobState.UNKNOWN
    world.server.faults.rule = lambda name: ""
    assert end_of(executor, handle).cause is Cause.PREEMPTED


def test_a_full_quota_is_retried_and_a_zero_quota_requires_intervention(
    world: SageMakerWorld, tmp_path: Path
) -> None:
    quota = "ml.m5.large for training job usage"
    executor = world.executor()
    world.server.limit(quota, 0)
    with pytest.raises(NeedsPerson, match="is 0 Instances"):
        launch(executor, "exit", 0, key="run-1-1")
    world.server.limit(quota, 1)
    first = launch(executor, "wait", tmp_path / "up", key="run-2-1")
    with pytest.raises(NoCapacity):
        launch(executor, "exit", 0, key="run-3-1")
    executor.cancel([first])
    end_of(executor, first)
    assert end_of(executor, launch(executor, "exit", 0, key="run-3-1")).cause == "done"


def test_a_repeated_launch_refused_by_the_quota_keeps_its_job_and_its_secret(
    world: SageMakerWorld, tmp_path: Path
) -> None:
    world.server.limit("ml.m5.large for training job usage", 1)
    world.server.withhold_machines()
    executor = world.executor()
    first = launch(executor, "exit", 0, own_secrets={"TOKEN": "s3cr3t"})
    for limit in (1, 0):
        world.server.limit("ml.m5.large for training job usage", limit)
        again = launch(world.executor(), "exit", 0, own_secrets={"TOKEN": "s3cr3t"})
        assert again == first
        assert len(world.server.secrets.kept) == 1
    world.server.give_machines()
    assert end_of(executor, first).cause is Cause.DONE


def test_one_that_came_back_before_anybody_looked_runs_on(
    world: SageMakerWorld, tmp_path: Path
) -> None:
    executor = world.executor()
    handle = launch(executor, "lines", tmp_path / "go on", spot=True)
    lines = executor.logs(handle, follow=True)
    assert next(lines).text == "first"
    world.preempt(handle)
    wait_for(lambda: described(world, handle)["SecondaryStatus"] == "Interrupted", "the end")
    world.server.give_machines()
    assert state_of(world.executor(), handle) == (JobState.RUNNING, None)
    (tmp_path / "go on").touch()
    # Both starts' output, in order: CloudWatch has a stream for each.
    end = "no newline at the end"
    assert [line.text for line in lines] == ["first", "second", end]
    assert end_of(executor, handle).cause is Cause.DONE
    (first, *rest) = executor.logs(handle)
    assert list(world.executor().logs(handle, after=first.position)) == rest


def test_a_spot_job_is_billed_less_than_it_trained(world: SageMakerWorld, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0, spot=True)
    status = end_of(executor, handle)
    assert status.billed_s == described(world, handle)["BillableTimeInSeconds"]


# Machines


def test_a_job_without_a_machine_is_pending(world: SageMakerWorld, tmp_path: Path) -> None:
    world.server.withhold_machines()
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    (status,) = executor.poll([handle])
    assert (status.state, status.phase) == (JobState.PENDING, "Starting")
    assert status.message.startswith("Insufficient capacity error from EC2")
    assert executor.live() == [handle]
    world.server.give_machines()
    number_in(tmp_path / "up")
    assert state_of(executor, handle) == (JobState.RUNNING, None)
    executor.cancel([handle])
    end_of(executor, handle)


def test_a_job_that_never_gets_a_machine_does_not_count_as_a_failure(
    world: SageMakerWorld,
) -> None:
    world.server.withhold_machines()
    executor = world.executor()
    handle = launch(executor, "exit", 0)
    world.server.starve(handle.launch_key)
    status = end_of(executor, handle)
    assert status.cause is Cause.PREEMPTED
    assert "CapacityError" in status.message


def test_a_machine_that_breaks_is_not_the_replicas_fault(
    world: SageMakerWorld, tmp_path: Path
) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    world.server.break_down(handle.data["name"])
    assert end_of(executor, handle).cause is Cause.LOST


def test_a_launch_that_is_throttled_goes_on(world: SageMakerWorld) -> None:
    executor = world.executor()
    executor.check()
    executor._launcher._sleep = lambda _: None
    world.server.throttle(3)  # as often as the SDK tries by itself
    handle = launch(executor, "exit", 0)
    assert end_of(executor, handle).cause is Cause.DONE
    world.server.throttle(99)
    with pytest.raises(RetryLater, match="Rate exceeded"):
        executor.poll([handle])


def test_a_name_is_taken_only_once(world: SageMakerWorld) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0)
    end_of(executor, handle)
    world.lose(handle)
    assert executor.find("run-0-1") is None
    with pytest.raises(LaunchRefused, match="takes a name only once"):
        launch(executor, "exit", 0)


def test_a_cut_name_still_tells_its_key(world: SageMakerWorld, tmp_path: Path) -> None:
    key = "k" * 61 + "-1"
    executor = world.executor(deployment="a-long-deployment-name")
    handle = launch(executor, "wait", tmp_path / "up", key=key)
    assert executor.live() == [handle] and handle.launch_key == key
    executor.cancel([handle])
    end_of(executor, handle)


def test_many_jobs_are_listed_page_by_page(world: SageMakerWorld) -> None:
    world.server.withhold_machines()
    world.server.limit("ml.m5.large for training job usage", 200)
    executor = world.executor()
    specs = [ReplicaSpec(launch_key=f"run-{n}-1", replica=n) for n in range(130)]
    handles = executor.launch_replicas(130, "replica_stub", specs=specs, env=stub_env())
    assert {handle.launch_key for handle in executor.live()} == {s.launch_key for s in specs}
    executor.poll(handles)
    before = world.requests()
    assert {status.state for status in executor.poll(handles)} == {JobState.PENDING}
    assert world.requests() - before == 2
    # Another deployment in the same account is not bothered by them.
    other = world.executor(deployment="another")
    alone = launch(other, "exit", 0)
    other.poll([alone])
    before = world.requests()
    other.poll([alone])
    assert world.requests() - before == 1


def test_logs_come_in_pages(world: SageMakerWorld) -> None:
    world.server.jobs.log_page = 7
    executor = world.executor()
    said = [f"line {n}" for n in range(40)]
    handle = launch(executor, "exit", 0, *said)
    end_of(executor, handle)
    lines = list(executor.logs(handle))
    assert [line.text for line in lines] == said
    for stop in (1, 6, 7, 8, 39):
        assert list(executor.logs(handle, after=lines[stop - 1].position)) == lines[stop:]


def test_code_of_the_rendezvous_is_run(world: SageMakerWorld, tmp_path: Path) -> None:
    executor = world.executor(python=sys.executable)
    (handle,) = executor.launch_replicas(
        1,
        "bundled",
        {"args": ["a", "b c"]},
        secrets={"TOKEN": "s3cr3t-1"},
        env={"DILOCO_CODE_DIR": str(tmp_path / "code")},
        code=code_in(tmp_path / "rendezvous"),
    )
    status = end_of(executor, handle)
    said = text_of(executor, handle)
    assert status.cause is Cause.DONE, said
    assert 'ran [["a", "b c"], "0"]' in said


def test_one_job_that_cannot_be_stopped_keeps_no_other_from_it(
    world: SageMakerWorld, tmp_path: Path
) -> None:
    world.server.withhold_machines()
    executor = world.executor()
    handles = [launch(executor, "exit", 0, key=f"run-{n}-1") for n in range(3)]
    refused: list[str] = []

    def rule(name: str) -> Fault:
        if name == "StopTrainingJob" and len(refused) < 3:  # as often as the SDK tries
            refused.append(name)
            return "unavailable"
        return ""

    world.server.faults.rule = rule
    with contextlib.suppress(RetryLater):
        executor.cancel(handles)
    statuses = [described(world, handle)["TrainingJobStatus"] for handle in handles]
    assert statuses.count("InProgress") <= 1
    executor.cancel(handles)
    assert {status.cause for status in executor.collect(handles, 60)} == {Cause.CANCELLED}
