"""The Modal executor, beyond the contract suite: queued GPUs, two kinds of Sandbox, and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import modal
import pytest

from executors.base import (
    Cause,
    JobState,
    LaunchRefused,
    NoCapacity,
    ReplicaHandle,
    ReplicaSpec,
    RetryLater,
)
from executors.modal.executor import ModalExecutor
from tests.emulators.faults import Fault
from tests.executors.harnesses import end_of, launch, number_in, wait_for
from tests.executors.modal.harness import ModalHarness

pytestmark = pytest.mark.processes


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ModalHarness]:
    with ModalHarness(tmp_path / "modal") as opened:
        yield opened


def made_of(harness: ModalHarness, handle: ReplicaHandle) -> Any:
    """The Sandbox definition that Modal received."""
    return harness.server.api.sandboxes[handle.data["id"]].definition


# Machines


def test_a_gpu_sandbox_requests_its_hardware(harness: ModalHarness) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 0, hardware="H100:2", region="us-east")
    made = made_of(harness, handle)
    assert (made.resources.gpu_config.gpu_type, made.resources.gpu_config.count) == ("H100", 2)
    assert (made.resources.milli_cpu, made.resources.memory_mb) == (2000, 16 * 1024)
    assert list(made.scheduler_placement.regions) == ["us-east"]
    assert made.timeout_secs == 24 * 3600
    assert made.name == "run-0-1"
    assert end_of(executor, handle).cause is Cause.DONE


def test_options_of_a_spec_change_the_machine(harness: ModalHarness) -> None:
    options = {"gpu": "B300+:3", "cpu": 4.5, "memory_mib": 1000, "volumes": {"/data": "corpus"}}
    handle = launch(harness.executor(), "exit", 0, hardware="anything", options=options)
    made = made_of(harness, handle)
    assert (made.resources.gpu_config.gpu_type, made.resources.gpu_config.count) == ("B300+", 3)
    assert (made.resources.milli_cpu, made.resources.memory_mb) == (4500, 1000)
    assert [(v.mount_path, v.volume_id) for v in made.volume_mounts] == [("/data", "vo-corpus")]


def test_a_launch_does_not_wait_for_an_unavailable_gpu(
    harness: ModalHarness, tmp_path: Path
) -> None:
    harness.server.starve()
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up", hardware="H100")
    (status,) = executor.poll([handle])
    assert (status.state, status.phase, status.started_wall_s) == (
        JobState.PENDING,
        "scheduling",
        None,
    )
    assert list(executor.logs(handle)) == []
    assert harness.executor().find("run-0-1") == handle
    assert launch(harness.executor(), "wait", tmp_path / "up", hardware="H100") == handle
    harness.server.starve(False)
    number_in(tmp_path / "up")
    (status,) = executor.poll([handle])
    assert status.state is JobState.RUNNING
    assert status.started_wall_s is not None and status.deadline_wall_s is not None
    assert status.deadline_wall_s == status.started_wall_s + 24 * 3600
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED


def test_a_job_that_waits_for_a_gpu_can_be_cancelled(harness: ModalHarness, tmp_path: Path) -> None:
    harness.server.starve()
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up", hardware="H100")
    executor.cancel([handle])
    status = end_of(executor, handle)
    assert (status.cause, status.started_wall_s) == (Cause.CANCELLED, None)
    harness.server.starve(False)
    assert launch(executor, "wait", tmp_path / "up", hardware="H100") == handle
    assert not (tmp_path / "up").exists()


def test_launches_return_while_many_jobs_wait_for_gpus(harness: ModalHarness) -> None:
    harness.server.starve()
    executor = harness.executor()
    specs = [ReplicaSpec(launch_key=f"run-{n}-1", replica=n, hardware="A10") for n in range(12)]
    handles = executor.launch_replicas(12, "replica_stub", {"args": ["exit", 0]}, specs=specs)
    assert {s.state for s in executor.poll(handles)} == {JobState.PENDING}
    assert sorted(executor.live(), key=str) == sorted(handles, key=str)
    wait_for(lambda: harness.server.connections == 1, "the launches' own clients to be closed")
    harness.server.starve(False)
    assert {s.state for s in executor.collect(handles, 60)} == {JobState.ENDED}


def test_a_job_stopped_before_it_has_a_gpu_is_found(harness: ModalHarness) -> None:
    """The SDK raises, and the launch still returns a job."""
    harness.server.starve()
    executor = harness.executor()
    with ThreadPoolExecutor(1) as pool:
        launching = pool.submit(launch, executor, "exit", 0, hardware="H100")
        wait_for(lambda: harness.server.api.sandboxes, "the Sandbox")
        (sandbox_id,) = harness.server.api.sandboxes
        harness.server.preempt(sandbox_id, as_termination=True)
        handle = launching.result()
    assert handle == executor.find("run-0-1")
    assert end_of(executor, handle).cause is Cause.PREEMPTED


@pytest.mark.parametrize("hardware", ["cpu", "H100"])
def test_an_ended_job_is_found_by_its_key(harness: ModalHarness, hardware: str) -> None:
    """The SDK's from_name finds Sandboxes with a GPU only while they are live."""
    executor = harness.executor()
    handle = launch(executor, "exit", 3, hardware=hardware)
    assert end_of(executor, handle).exit_code == 3
    assert harness.executor().find("run-0-1") == handle
    assert launch(harness.executor(), "exit", 0, hardware=hardware) == handle
    assert len(harness.server.api.sandboxes) == 1


@pytest.mark.parametrize("hardware", ["cpu", "H100"])
def test_handles_work_without_records_of_ended_jobs(
    harness: ModalHarness, tmp_path: Path, hardware: str
) -> None:
    harness.server.api.lists_ended = False
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up", hardware=hardware)
    number_in(tmp_path / "up")
    assert launch(harness.executor(), "wait", tmp_path / "up", hardware=hardware) == handle
    assert executor.poll([handle])[0].state is JobState.RUNNING
    executor.cancel([handle])
    status = end_of(executor, handle)
    assert (status.cause, status.exit_code) == (Cause.PREEMPTED, 137)
    assert executor.find("run-0-1") is None
    over = launch(executor, "exit", 0, key="run-0-2", hardware=hardware)
    late = launch(executor, "wait", tmp_path / "b", key="run-0-3", hardware=hardware, timeout_s=1)
    assert end_of(executor, over).cause is Cause.DONE
    assert end_of(executor, late).cause is Cause.DEADLINE


def test_an_external_stop_counts_as_preemption(harness: ModalHarness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up", hardware="T4")
    number_in(tmp_path / "up")
    harness.server.preempt(handle.data["id"], as_termination=True)
    status = end_of(executor, handle)
    assert status.cause is Cause.PREEMPTED
    assert "terminated: Modal reclaimed the machine" in status.message


def test_many_live_jobs_are_on_several_pages(harness: ModalHarness, tmp_path: Path) -> None:
    executor = harness.executor()
    harness.server.starve()
    specs = [ReplicaSpec(launch_key=f"run-{n}-1", replica=n, hardware="L4") for n in range(25)]
    with ThreadPoolExecutor(25) as pool:
        list(pool.map(lambda spec: _queue(executor, spec), specs))
    live = executor.live()
    assert sorted(handle.launch_key for handle in live) == sorted(s.launch_key for s in specs)
    before = harness.requests()
    assert {status.state for status in executor.poll(live)} == {JobState.PENDING}
    assert harness.requests() - before == 4


def _queue(executor: ModalExecutor, spec: ReplicaSpec) -> None:
    executor.launch_replicas(1, "replica_stub", {"args": ["exit", 0]}, specs=[spec])


# Names, tags, secrets


def test_tags_are_valid_for_modal(harness: ModalHarness) -> None:
    labels = {"run name": "a model, ü and 100 %", "note": "x" * 80}
    handle = launch(harness.executor(), "exit", 0, labels=labels)
    tags = harness.server.api.sandboxes[handle.data["id"]].tags
    assert tags == {
        "run-name": "a-model----and-100--",
        "note": "x" * 63,
        "archipelago-deployment": "contract",
        "archipelago-key": "run-0-1",
        "archipelago-replica": "0",
    }


@pytest.mark.parametrize("hardware", ["cpu", "H100"])
def test_secrets_are_sent_as_modal_secrets(harness: ModalHarness, hardware: str) -> None:
    handle = launch(
        harness.executor(), "digests", "TOKEN", hardware=hardware, secrets={"TOKEN": "s3cr3t-41c"}
    )
    assert "s3cr3t-41c" not in harness.description(handle)
    assert end_of(harness.executor(), handle).exit_code == 0


def test_a_name_of_another_deployment_is_refused(harness: ModalHarness) -> None:
    other = harness.executor(app="shared", deployment="another")
    handle = launch(other, "env", key="run-0-1", hardware="H100")
    executor = harness.executor(app="shared")
    harness.server.starve()
    queued = launch(other, "env", key="run-0-2", hardware="H100")
    with pytest.raises(LaunchRefused, match=r"belongs to another deployment.*option app"):
        launch(executor, "env", key="run-0-2", hardware="H100")
    assert executor.find("run-0-1") is None
    assert executor.live() == []
    assert other.live() == [queued]
    assert end_of(other, handle).cause is Cause.DONE


def test_reads_create_nothing(harness: ModalHarness) -> None:
    executor = harness.executor()
    assert executor.find("run-0-1") is None
    assert executor.live() == []
    assert executor.preflight(ReplicaSpec(launch_key="run-0-1", replica=0), 1) == []
    assert harness.server.api.apps == {}


def test_a_full_workspace_is_retried(harness: ModalHarness, tmp_path: Path) -> None:
    harness.server.limit(1)
    executor = harness.executor()
    first = launch(executor, "wait", tmp_path / "up", key="run-0-1")
    number_in(tmp_path / "up")
    with pytest.raises(NoCapacity, match="1 Sandboxes"):
        launch(executor, "exit", 0, key="run-1-1")
    executor.cancel([first])
    end_of(executor, first)
    end_of(executor, launch(executor, "exit", 0, key="run-1-1"))


def test_an_unreadable_log_is_reported_and_read_later(
    harness: ModalHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 0, "one", "two")
    end_of(executor, handle)
    first, *rest = executor.logs(handle)

    async def broken(*_: object) -> None:
        raise modal.exception.ExecutionError("Get from url failed with status 503")

    with monkeypatch.context() as patched:
        patched.setattr("executors.modal.executor._entries", broken)
        with pytest.raises(RetryLater, match="status 503"):
            list(executor.logs(handle, after=first.position))
    assert list(executor.logs(handle, after=first.position)) == rest


@pytest.mark.parametrize("fault", ["drop_before", "drop_after", "unavailable"])
def test_a_lost_response_creates_no_second_sandbox(
    harness: ModalHarness, tmp_path: Path, fault: Fault
) -> None:
    executor = harness.executor(api_timeout_s=5.0)
    left = ["SandboxCreateV2"]
    harness.server.faults.rule = lambda name: (
        fault if name in left and not left.remove(name) else ""
    )
    handles = []
    while not handles:
        with contextlib.suppress(RetryLater):
            handles.append(launch(executor, "wait", tmp_path / "up"))
    assert not left
    number_in(tmp_path / "up")
    executor = harness.executor()
    assert executor.live() == handles
    executor.cancel(handles)
    end_of(executor, handles[0])


def cancelled(executor: ModalExecutor, handle: ReplicaHandle) -> bool:
    """Whether the call ended; on a busy machine a request can have no answer in time."""
    with contextlib.suppress(RetryLater):
        executor.cancel([handle])
        return True
    return False


@pytest.mark.parametrize("fault", ["drop_before", "unavailable"])
@pytest.mark.parametrize("request_name", ["SandboxTagsGet", "SandboxTagsSet"])
def test_a_sandbox_is_ended_although_it_cannot_be_marked(
    harness: ModalHarness, tmp_path: Path, request_name: str, fault: Fault
) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    harness.server.faults.rule = lambda name: fault if name.startswith(request_name) else ""
    impatient = harness.executor(api_timeout_s=2.0)
    wait_for(lambda: cancelled(impatient, handle), "the cancellation")
    assert end_of(executor, handle).cause in (Cause.CANCELLED, Cause.PREEMPTED)
