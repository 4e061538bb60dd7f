"""The SageMaker executor, beyond the contract suite: spot, capacity, names and logs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executors.base import (
    AccountError,
    Cause,
    JobState,
    LaunchRefused,
    NoCapacity,
    ReplicaHandle,
    ReplicaSpec,
    RetryLater,
)
from executors.sagemaker.executor import SageMakerExecutor
from tests.emulators.faults import Fault
from tests.executors.bundles import code_in
from tests.executors.harnesses import end_of, launch, number_in, stub_env, text_of, wait_for
from tests.executors.sagemaker.harness import REGION, SageMakerHarness

pytestmark = pytest.mark.processes


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[SageMakerHarness]:
    with SageMakerHarness(tmp_path / "world") as opened:
        yield opened


def described(harness: SageMakerHarness, handle: ReplicaHandle) -> dict[str, Any]:
    return harness.server.jobs.describe(REGION, {"TrainingJobName": handle.data["name"]})


def state_of(executor: SageMakerExecutor, handle: ReplicaHandle) -> tuple[JobState, Cause | None]:
    (status,) = executor.poll([handle])
    return status.state, status.cause


# Spot


def test_an_interrupted_job_is_stopped_and_stays_stopped(
    harness: SageMakerHarness, tmp_path: Path
) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up", spot=True, secrets={"TOKEN": "s3cr3t-1"})
    number_in(tmp_path / "up")
    assert state_of(executor, handle) == (JobState.RUNNING, None)
    harness.preempt(handle)
    status = end_of(executor, handle)
    assert (status.cause, status.message) == (Cause.PREEMPTED, "the spot instance was interrupted")
    assert harness.server.secrets.kept == {}
    (tmp_path / "up").unlink()
    harness.server.give_machines()
    assert described(harness, handle)["TrainingJobStatus"] == "Stopped"
    for other in (executor, harness.executor()):
        (again,) = other.poll([handle])
        assert (again.state, again.cause) == (JobState.ENDED, Cause.PREEMPTED)
    assert again.billed_s is not None
    assert executor.live() == []
    assert not (tmp_path / "up").exists()


def test_an_interrupted_spot_job_has_ended_only_when_it_no_longer_uses_the_quota(
    harness: SageMakerHarness, tmp_path: Path
) -> None:
    harness.server.limit("ml.m5.large for spot training job usage", 1)
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up", spot=True)
    number_in(tmp_path / "up")
    harness.server.hold_stopping()
    harness.preempt(handle)
    wait_for(lambda: described(harness, handle)["SecondaryStatus"] == "Interrupted", "the spot end")
    phases = []
    for _ in range(3):
        (status,) = executor.poll([handle])
        assert (status.state, status.cause) == (JobState.RUNNING, None)
        assert "interrupted" in status.message
        phases.append(status.phase)
    assert phases == ["Interrupted", "Stopping", "Stopping"]  # the first poll stops the job
    with pytest.raises(NoCapacity, match="is 1 Instances, with current utilization of 1"):
        launch(executor, "exit", 0, key="run-0-2", spot=True)
    harness.server.hold_stopping(False)
    status = end_of(executor, handle)
    assert status.cause is Cause.PREEMPTED
    assert end_of(executor, launch(executor, "exit", 0, key="run-0-2", spot=True)).cause == "done"


def test_an_interrupted_job_is_stopped_even_when_the_first_request_is_lost(
    harness: SageMakerHarness, tmp_path: Path
) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up", spot=True)
    number_in(tmp_path / "up")
    harness.preempt(handle)
    wait_for(lambda: described(harness, handle)["SecondaryStatus"] == "Interrupted", "the spot end")
    harness.server.faults.rule = lambda name: "unavailable" if name == "StopTrainingJob" else ""
    assert executor.poll([handle])[0].state is JobState.UNKNOWN
    harness.server.faults.rule = lambda name: ""
    assert end_of(executor, handle).cause is Cause.PREEMPTED


def test_a_full_quota_is_retried_and_a_zero_quota_requires_intervention(
    harness: SageMakerHarness, tmp_path: Path
) -> None:
    quota = "ml.m5.large for training job usage"
    executor = harness.executor()
    harness.server.limit(quota, 0)
    with pytest.raises(AccountError, match="is 0 Instances"):
        launch(executor, "exit", 0, key="run-1-1")
    harness.server.limit(quota, 1)
    first = launch(executor, "wait", tmp_path / "up", key="run-2-1")
    with pytest.raises(NoCapacity):
        launch(executor, "exit", 0, key="run-3-1")
    executor.cancel([first])
    end_of(executor, first)
    assert end_of(executor, launch(executor, "exit", 0, key="run-3-1")).cause == "done"


def test_a_repeated_launch_refused_by_the_quota_keeps_its_job_and_its_secret(
    harness: SageMakerHarness, tmp_path: Path
) -> None:
    harness.server.limit("ml.m5.large for training job usage", 1)
    harness.server.withhold_machines()
    executor = harness.executor()
    first = launch(executor, "exit", 0, own_secrets={"TOKEN": "s3cr3t"})
    for limit in (1, 0):
        harness.server.limit("ml.m5.large for training job usage", limit)
        again = launch(harness.executor(), "exit", 0, own_secrets={"TOKEN": "s3cr3t"})
        assert again == first
        assert len(harness.server.secrets.kept) == 1
    harness.server.give_machines()
    assert end_of(executor, first).cause is Cause.DONE


def test_a_spot_job_that_restarted_between_polls_keeps_running(
    harness: SageMakerHarness, tmp_path: Path
) -> None:
    executor = harness.executor()
    handle = launch(executor, "lines", tmp_path / "go on", spot=True)
    lines = executor.logs(handle, follow=True)
    assert next(lines).text == "first"
    harness.preempt(handle)
    wait_for(lambda: described(harness, handle)["SecondaryStatus"] == "Interrupted", "the end")
    harness.server.give_machines()
    assert state_of(harness.executor(), handle) == (JobState.RUNNING, None)
    (tmp_path / "go on").touch()
    # The output of both starts, in order: CloudWatch has a stream for each.
    end = "no newline at the end"
    assert [line.text for line in lines] == ["first", "second", end]
    assert end_of(executor, handle).cause is Cause.DONE
    (first, *rest) = executor.logs(handle)
    assert list(harness.executor().logs(handle, after=first.position)) == rest


def test_a_spot_job_is_billed_less_than_it_trained(
    harness: SageMakerHarness, tmp_path: Path
) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 0, spot=True)
    status = end_of(executor, handle)
    assert status.billed_s == described(harness, handle)["BillableTimeInSeconds"]


# Machines


def test_a_job_without_a_machine_is_pending(harness: SageMakerHarness, tmp_path: Path) -> None:
    harness.server.withhold_machines()
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    (status,) = executor.poll([handle])
    assert (status.state, status.phase) == (JobState.PENDING, "Starting")
    assert status.message.startswith("Insufficient capacity error from EC2")
    assert executor.live() == [handle]
    harness.server.give_machines()
    number_in(tmp_path / "up")
    assert state_of(executor, handle) == (JobState.RUNNING, None)
    executor.cancel([handle])
    end_of(executor, handle)


def test_a_job_that_never_gets_a_machine_does_not_count_as_a_failure(
    harness: SageMakerHarness,
) -> None:
    harness.server.withhold_machines()
    executor = harness.executor()
    handle = launch(executor, "exit", 0)
    harness.server.starve(handle.launch_key)
    status = end_of(executor, handle)
    assert status.cause is Cause.PREEMPTED
    assert "CapacityError" in status.message


def test_a_broken_machine_does_not_count_as_a_failure_of_the_replica(
    harness: SageMakerHarness, tmp_path: Path
) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    harness.server.break_down(handle.data["name"])
    assert end_of(executor, handle).cause is Cause.LOST


def test_a_throttled_launch_is_retried(harness: SageMakerHarness) -> None:
    executor = harness.executor()
    executor.check()
    executor._launcher._sleep = lambda _: None
    harness.server.throttle(3)  # as often as the SDK retries by itself
    handle = launch(executor, "exit", 0)
    assert end_of(executor, handle).cause is Cause.DONE
    harness.server.throttle(99)
    with pytest.raises(RetryLater, match="Rate exceeded"):
        executor.poll([handle])


def test_a_name_is_taken_only_once(harness: SageMakerHarness) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 0)
    end_of(executor, handle)
    harness.lose(handle)
    assert executor.find("run-0-1") is None
    with pytest.raises(LaunchRefused, match="takes a name only once"):
        launch(executor, "exit", 0)


def test_a_truncated_name_finds_its_key(harness: SageMakerHarness, tmp_path: Path) -> None:
    key = "k" * 61 + "-1"
    executor = harness.executor(deployment="a-long-deployment-name")
    handle = launch(executor, "wait", tmp_path / "up", key=key)
    assert executor.live() == [handle] and handle.launch_key == key
    executor.cancel([handle])
    end_of(executor, handle)


def test_many_jobs_are_listed_page_by_page(harness: SageMakerHarness) -> None:
    harness.server.withhold_machines()
    harness.server.limit("ml.m5.large for training job usage", 200)
    executor = harness.executor()
    specs = [ReplicaSpec(launch_key=f"run-{n}-1", replica=n) for n in range(130)]
    handles = executor.launch_replicas(130, "replica_stub", specs=specs, env=stub_env())
    assert {handle.launch_key for handle in executor.live()} == {s.launch_key for s in specs}
    executor.poll(handles)
    before = harness.requests()
    assert {status.state for status in executor.poll(handles)} == {JobState.PENDING}
    assert harness.requests() - before == 2
    # Another deployment in the same account does not see them.
    other = harness.executor(deployment="another")
    alone = launch(other, "exit", 0)
    other.poll([alone])
    before = harness.requests()
    other.poll([alone])
    assert harness.requests() - before == 1


def test_logs_are_read_page_by_page(harness: SageMakerHarness) -> None:
    harness.server.jobs.log_page = 7
    executor = harness.executor()
    output = [f"line {n}" for n in range(40)]
    handle = launch(executor, "exit", 0, *output)
    end_of(executor, handle)
    lines = list(executor.logs(handle))
    assert [line.text for line in lines] == output
    for stop in (1, 6, 7, 8, 39):
        assert list(executor.logs(handle, after=lines[stop - 1].position)) == lines[stop:]


def test_code_of_the_rendezvous_is_run(harness: SageMakerHarness, tmp_path: Path) -> None:
    executor = harness.executor(python=sys.executable)
    (handle,) = executor.launch_replicas(
        1,
        "bundled",
        {"args": ["a", "b c"]},
        secrets={"TOKEN": "s3cr3t-1"},
        env={"DILOCO_CODE_DIR": str(tmp_path / "code")},
        code=code_in(tmp_path / "rendezvous"),
    )
    status = end_of(executor, handle)
    output = text_of(executor, handle)
    assert status.cause is Cause.DONE, output
    assert 'ran [["a", "b c"], "0"]' in output


def test_a_job_that_cannot_be_stopped_does_not_prevent_other_stops(
    harness: SageMakerHarness, tmp_path: Path
) -> None:
    harness.server.withhold_machines()
    executor = harness.executor()
    handles = [launch(executor, "exit", 0, key=f"run-{n}-1") for n in range(3)]
    refused: list[str] = []

    def rule(name: str) -> Fault:
        if name == "StopTrainingJob" and len(refused) < 3:  # as often as the SDK retries
            refused.append(name)
            return "unavailable"
        return ""

    harness.server.faults.rule = rule
    with contextlib.suppress(RetryLater):
        executor.cancel(handles)
    statuses = [described(harness, handle)["TrainingJobStatus"] for handle in handles]
    assert statuses.count("InProgress") <= 1
    executor.cancel(handles)
    assert {status.cause for status in executor.collect(handles, 60)} == {Cause.CANCELLED}
