"""What only Modal does: GPUs that nobody waits for, two kinds of Sandbox, its own ends.

What every executor does is in ``tests/contracts/test_executor*.py``.
"""

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
from tests.executors.modal.world import ModalWorld
from tests.executors.worlds import end_of, launch, number_in, wait_for

pytestmark = pytest.mark.processes


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ModalWorld]:
    with ModalWorld(tmp_path / "modal") as opened:
        yield opened


def made_of(world: ModalWorld, handle: ReplicaHandle) -> Any:
    """The definition that Modal was given."""
    return world.server.api.sandboxes[handle.data["id"]].definition


# Machines


def test_a_gpu_sandbox_asks_for_what_its_hardware_says(world: ModalWorld) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0, hardware="H100:2", region="us-east")
    made = made_of(world, handle)
    assert (made.resources.gpu_config.gpu_type, made.resources.gpu_config.count) == ("H100", 2)
    assert (made.resources.milli_cpu, made.resources.memory_mb) == (2000, 16 * 1024)
    assert list(made.scheduler_placement.regions) == ["us-east"]
    assert made.timeout_secs == 24 * 3600
    assert made.name == "run-0-1"
    assert end_of(executor, handle).cause is Cause.DONE


def test_options_of_a_spec_change_the_machine(world: ModalWorld) -> None:
    options = {"gpu": "B300+:3", "cpu": 4.5, "memory_mib": 1000, "volumes": {"/data": "corpus"}}
    handle = launch(world.executor(), "exit", 0, hardware="anything", options=options)
    made = made_of(world, handle)
    assert (made.resources.gpu_config.gpu_type, made.resources.gpu_config.count) == ("B300+", 3)
    assert (made.resources.milli_cpu, made.resources.memory_mb) == (4500, 1000)
    assert [(v.mount_path, v.volume_id) for v in made.volume_mounts] == [("/data", "vo-corpus")]


def test_a_gpu_that_is_not_there_is_not_waited_for(world: ModalWorld, tmp_path: Path) -> None:
    world.server.starve()
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", hardware="H100")
    (status,) = executor.poll([handle])
    assert (status.state, status.phase, status.started_wall_s) == (
        JobState.PENDING, "scheduling", None,
    )  # fmt: skip
    assert list(executor.logs(handle)) == []
    assert world.executor().find("run-0-1") == handle
    assert launch(world.executor(), "wait", tmp_path / "up", hardware="H100") == handle
    world.server.starve(False)
    number_in(tmp_path / "up")
    (status,) = executor.poll([handle])
    assert status.state is JobState.RUNNING
    assert status.started_wall_s is not None and status.deadline_wall_s is not None
    assert status.deadline_wall_s == status.started_wall_s + 24 * 3600
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED


def test_one_that_waits_for_a_gpu_can_be_cancelled(world: ModalWorld, tmp_path: Path) -> None:
    world.server.starve()
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", hardware="H100")
    executor.cancel([handle])
    status = end_of(executor, handle)
    assert (status.cause, status.started_wall_s) == (Cause.CANCELLED, None)
    world.server.starve(False)
    assert launch(executor, "wait", tmp_path / "up", hardware="H100") == handle
    assert not (tmp_path / "up").exists()


def test_many_wait_for_gpus_and_their_launches_are_over(world: ModalWorld) -> None:
    world.server.starve()
    executor = world.executor()
    specs = [ReplicaSpec(launch_key=f"run-{n}-1", replica=n, hardware="A10") for n in range(12)]
    handles = executor.launch_replicas(12, "replica_stub", {"args": ["exit", 0]}, specs=specs)
    assert {s.state for s in executor.poll(handles)} == {JobState.PENDING}
    assert sorted(executor.live(), key=str) == sorted(handles, key=str)
    wait_for(lambda: world.server.connections == 1, "the launches' own clients to be closed")
    world.server.starve(False)
    assert {s.state for s in executor.collect(handles, 60)} == {JobState.ENDED}


def test_one_that_is_stopped_before_it_has_a_gpu_is_found(world: ModalWorld) -> None:
    """The SDK raises then, and the launch has a job all the same."""
    world.server.starve()
    executor = world.executor()
    with ThreadPoolExecutor(1) as pool:
        launching = pool.submit(launch, executor, "exit", 0, hardware="H100")
        wait_for(lambda: world.server.api.sandboxes, "the Sandbox")
        (sandbox_id,) = world.server.api.sandboxes
        world.server.preempt(sandbox_id, as_termination=True)
        handle = launching.result()
    assert handle == executor.find("run-0-1")
    assert end_of(executor, handle).cause is Cause.PREEMPTED


@pytest.mark.parametrize("hardware", ["cpu", "H100"])
def test_an_ended_one_is_found_by_its_key(world: ModalWorld, hardware: str) -> None:
    """The SDK's own from_name finds those with a GPU only while they live."""
    executor = world.executor()
    handle = launch(executor, "exit", 3, hardware=hardware)
    assert end_of(executor, handle).exit_code == 3
    assert world.executor().find("run-0-1") == handle
    assert launch(world.executor(), "exit", 0, hardware=hardware) == handle
    assert len(world.server.api.sandboxes) == 1


@pytest.mark.parametrize("hardware", ["cpu", "H100"])
def test_without_records_of_ended_ones_handles_still_work(
    world: ModalWorld, tmp_path: Path, hardware: str
) -> None:
    world.server.api.tells_ended = False
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", hardware=hardware)
    number_in(tmp_path / "up")
    assert launch(world.executor(), "wait", tmp_path / "up", hardware=hardware) == handle
    assert executor.poll([handle])[0].state is JobState.RUNNING
    executor.cancel([handle])
    status = end_of(executor, handle)
    assert (status.cause, status.exit_code) == (Cause.PREEMPTED, 137)
    assert executor.find("run-0-1") is None
    over = launch(executor, "exit", 0, key="run-0-2", hardware=hardware)
    late = launch(executor, "wait", tmp_path / "b", key="run-0-3", hardware=hardware, timeout_s=1)
    assert end_of(executor, over).cause is Cause.DONE
    assert end_of(executor, late).cause is Cause.DEADLINE


def test_a_stop_from_outside_is_no_cancel(world: ModalWorld, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", hardware="T4")
    number_in(tmp_path / "up")
    world.server.preempt(handle.data["id"], as_termination=True)
    status = end_of(executor, handle)
    assert status.cause is Cause.PREEMPTED
    assert "stopped from outside" in status.message


def test_many_living_ones_are_on_several_pages(world: ModalWorld, tmp_path: Path) -> None:
    executor = world.executor()
    world.server.starve()
    specs = [ReplicaSpec(launch_key=f"run-{n}-1", replica=n, hardware="L4") for n in range(25)]
    with ThreadPoolExecutor(25) as pool:
        list(pool.map(lambda spec: _queue(executor, spec), specs))
    live = executor.live()
    assert sorted(handle.launch_key for handle in live) == sorted(s.launch_key for s in specs)
    before = world.requests()
    assert {status.state for status in executor.poll(live)} == {JobState.PENDING}
    assert world.requests() - before == 4


def _queue(executor: ModalExecutor, spec: ReplicaSpec) -> None:
    executor.launch_replicas(1, "replica_stub", {"args": ["exit", 0]}, specs=[spec])


# Names, tags, secrets


def test_tags_are_what_modal_takes(world: ModalWorld) -> None:
    labels = {"run name": "a model, ü and 100 %", "note": "x" * 80}
    handle = launch(world.executor(), "exit", 0, labels=labels)
    tags = world.server.api.sandboxes[handle.data["id"]].tags
    assert tags == {
        "run-name": "a-model----and-100--",
        "note": "x" * 63,
        "archipelago-deployment": "contract",
        "archipelago-key": "run-0-1",
        "archipelago-replica": "0",
    }


@pytest.mark.parametrize("hardware", ["cpu", "H100"])
def test_secrets_travel_as_secrets(world: ModalWorld, hardware: str) -> None:
    handle = launch(
        world.executor(), "digests", "TOKEN", hardware=hardware, secrets={"TOKEN": "s3cr3t-41c"}
    )
    assert "s3cr3t-41c" not in world.description(handle)
    assert end_of(world.executor(), handle).exit_code == 0


def test_the_name_of_another_deployment_is_not_taken_for_ours(world: ModalWorld) -> None:
    theirs = world.executor(app="shared", deployment="theirs")
    handle = launch(theirs, "env", key="run-0-1", hardware="H100")
    ours = world.executor(app="shared")
    world.server.starve()
    queued = launch(theirs, "env", key="run-0-2", hardware="H100")
    with pytest.raises(LaunchRefused, match=r"not ours.*option app"):
        launch(ours, "env", key="run-0-2", hardware="H100")
    assert ours.find("run-0-1") is None
    assert ours.live() == []
    assert theirs.live() == [queued]
    assert end_of(theirs, handle).cause is Cause.DONE


def test_nothing_is_made_by_asking(world: ModalWorld) -> None:
    executor = world.executor()
    assert executor.find("run-0-1") is None
    assert executor.live() == []
    assert executor.preflight(ReplicaSpec(launch_key="run-0-1", replica=0), 1) == []
    assert world.server.api.apps == {}


def test_a_full_workspace_is_retried(world: ModalWorld, tmp_path: Path) -> None:
    world.server.limit(1)
    executor = world.executor()
    first = launch(executor, "wait", tmp_path / "up", key="run-0-1")
    number_in(tmp_path / "up")
    with pytest.raises(NoCapacity, match="1 Sandboxes"):
        launch(executor, "exit", 0, key="run-1-1")
    executor.cancel([first])
    end_of(executor, first)
    end_of(executor, launch(executor, "exit", 0, key="run-1-1"))


def test_a_log_that_cannot_be_read_is_reported_and_read_on(
    world: ModalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = world.executor()
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
def test_a_lost_answer_makes_no_second_sandbox(
    world: ModalWorld, tmp_path: Path, fault: Fault
) -> None:
    executor = world.executor(api_timeout_s=5.0)
    left = ["SandboxCreateV2"]
    world.server.faults.rule = lambda name: fault if name in left and not left.remove(name) else ""
    handles = []
    while not handles:
        with contextlib.suppress(RetryLater):
            handles.append(launch(executor, "wait", tmp_path / "up"))
    assert not left
    number_in(tmp_path / "up")
    assert executor.live() == handles
    executor.cancel(handles)
    end_of(executor, handles[0])


@pytest.mark.parametrize("fault", ["drop_before", "unavailable"])
@pytest.mark.parametrize("request_name", ["SandboxTagsGet", "SandboxTagsSet"])
def test_a_sandbox_is_ended_although_it_cannot_be_marked(
    world: ModalWorld, tmp_path: Path, request_name: str, fault: Fault
) -> None:
    executor = world.executor(api_timeout_s=2.0)
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    world.server.faults.rule = lambda name: fault if name.startswith(request_name) else ""
    executor.cancel([handle])
    assert end_of(executor, handle).cause in (Cause.CANCELLED, Cause.PREEMPTED)
