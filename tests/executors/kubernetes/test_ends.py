"""How Jobs end where Kubernetes is unlike others: what outlives the pod, grace, clearing away."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from executors.base import Cause, JobState
from tests.executors.kubernetes.world import KubernetesWorld
from tests.executors.worlds import end_of, is_gone, launch, number_in, text_of, wait_for

SECRET = {"TOKEN": "s3cr3t-1c9e"}

pytestmark = pytest.mark.processes


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KubernetesWorld]:
    with KubernetesWorld(tmp_path / "world") as opened:
        yield opened


def test_an_error_comes_with_its_last_lines(world: KubernetesWorld) -> None:
    executor = world.executor()
    status = end_of(executor, launch(executor, "exit", 5, *range(2000), "the reason"))
    assert status.message.startswith("ended with exit code 5. Last lines of its log:\n")
    assert status.message.endswith("\nthe reason") and len(status.message) < 2200


def test_the_exit_code_outlives_the_pod(world: KubernetesWorld) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 78)
    end_of(executor, handle)
    (pod,) = world.cluster.pods("run-0-1")
    world.cluster.kubelet.forget(pod)
    (status,) = executor.poll([handle])
    assert (status.cause, status.exit_code) == (Cause.ERROR, 78)


def test_a_preempted_replica_had_its_grace(world: KubernetesWorld, tmp_path: Path) -> None:
    """Who saved its state and left with 0 was not lost to the preemption."""
    executor = world.executor(grace_s=30)
    handle = launch(executor, "polite", tmp_path / "up")
    number_in(tmp_path / "up")
    world.preempt(handle)
    assert end_of(executor, handle).cause is Cause.DONE


def test_the_log_of_one_past_its_deadline_is_kept(world: KubernetesWorld, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "lines", tmp_path / "never", timeout_s=4)
    status = end_of(executor, handle)
    assert (status.cause, status.exit_code) == (Cause.DEADLINE, 128 + signal.SIGTERM)
    assert "Pod was active on the node longer" in status.message
    assert text_of(executor, handle) == ["first"]


def test_a_replica_killed_from_inside_is_an_error(world: KubernetesWorld, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    os.kill(number_in(tmp_path / "up"), signal.SIGKILL)
    status = end_of(executor, handle)
    assert (status.cause, status.exit_code) == (Cause.ERROR, 137)
    assert "SIGKILL" in status.message


def test_a_job_is_cleared_away_after_its_time(world: KubernetesWorld, tmp_path: Path) -> None:
    executor = world.executor(keep_s=0)
    handle = launch(executor, "wait", tmp_path / "up", secrets=SECRET)
    os.kill(number_in(tmp_path / "up"), signal.SIGTERM)
    wait_for(lambda: executor.find("run-0-1") is None, "the Job to be cleared away")
    assert executor.poll([handle])[0].cause is Cause.LOST
    wait_for(lambda: not world.cluster.objects.all("secrets"), "the Secret to go")


def test_cancelled_before_it_began(world: KubernetesWorld, tmp_path: Path) -> None:
    executor = world.executor()
    world.cluster.kubelet.missing_images.add("replica:later")
    handle = launch(executor, "wait", tmp_path / "up", image="replica:later")
    executor.cancel([handle])
    status = end_of(executor, handle)
    assert (status.cause, status.exit_code) == (Cause.CANCELLED, None)
    world.cluster.kubelet.missing_images.clear()
    assert launch(executor, "wait", tmp_path / "up") == handle
    assert end_of(executor, handle) == status
    assert not (tmp_path / "up").exists()


def test_a_job_asked_to_end_is_ending_until_it_has(world: KubernetesWorld, tmp_path: Path) -> None:
    executor = world.executor(grace_s=600)
    handle = launch(executor, "deaf", tmp_path / "up")
    pid = number_in(tmp_path / "up")
    executor.cancel([handle])
    (pod,) = world.cluster.pods("run-0-1")
    wait_for(lambda: "deletionTimestamp" in pod["metadata"], "the cluster to ask it")
    (status,) = executor.poll([handle])
    assert (status.state, status.phase) == (JobState.RUNNING, "Ending") and not is_gone(pid)
    assert executor.live() == [handle]
    os.kill(pid, signal.SIGKILL)
    assert end_of(executor, handle).cause is Cause.CANCELLED
