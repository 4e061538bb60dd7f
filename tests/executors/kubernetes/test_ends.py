"""Ends that are specific to Kubernetes: state that outlives the pod, grace period, cleanup."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from executors.base import Cause, JobState
from tests.executors.harnesses import end_of, is_gone, launch, number_in, text_of, wait_for
from tests.executors.kubernetes.harness import KubernetesHarness

SECRET = {"TOKEN": "s3cr3t-1c9e"}

pytestmark = pytest.mark.processes


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[KubernetesHarness]:
    with KubernetesHarness(tmp_path / "world") as opened:
        yield opened


def test_an_error_comes_with_its_last_lines(harness: KubernetesHarness) -> None:
    executor = harness.executor()
    status = end_of(executor, launch(executor, "exit", 5, *range(2000), "the reason"))
    assert status.message.startswith("ended with exit code 5. Last lines of its log:\n")
    assert status.message.endswith("\nthe reason") and len(status.message) < 2200


def test_the_exit_code_outlives_the_pod(harness: KubernetesHarness) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 78)
    end_of(executor, handle)
    (pod,) = harness.cluster.pods("run-0-1")
    harness.cluster.kubelet.forget(pod)
    (status,) = executor.poll([handle])
    assert (status.cause, status.exit_code) == (Cause.ERROR, 78)


def test_a_preempted_replica_had_its_grace(harness: KubernetesHarness, tmp_path: Path) -> None:
    """A replica that saved its state and exited with 0 counts as done, not preempted."""
    executor = harness.executor(grace_s=30)
    handle = launch(executor, "polite", tmp_path / "up")
    number_in(tmp_path / "up")
    harness.preempt(handle)
    assert end_of(executor, handle).cause is Cause.DONE


def test_the_log_of_a_job_past_its_deadline_is_kept(
    harness: KubernetesHarness, tmp_path: Path
) -> None:
    executor = harness.executor()
    handle = launch(executor, "lines", tmp_path / "never", timeout_s=3600)
    wait_for(lambda: text_of(executor, handle) == ["first"], "the first line")
    harness.cluster.expire(handle.launch_key)
    status = end_of(executor, handle)
    assert (status.cause, status.exit_code) == (Cause.DEADLINE, 128 + signal.SIGTERM)
    assert "Pod was active on the node longer" in status.message
    assert text_of(executor, handle) == ["first"]


def test_a_replica_killed_from_inside_is_an_error(
    harness: KubernetesHarness, tmp_path: Path
) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    os.kill(number_in(tmp_path / "up"), signal.SIGKILL)
    status = end_of(executor, handle)
    assert (status.cause, status.exit_code) == (Cause.ERROR, 137)
    assert "SIGKILL" in status.message


def test_an_ended_job_is_deleted_after_its_ttl(harness: KubernetesHarness, tmp_path: Path) -> None:
    executor = harness.executor(keep_s=0)
    handle = launch(executor, "wait", tmp_path / "up", secrets=SECRET)
    os.kill(number_in(tmp_path / "up"), signal.SIGTERM)
    wait_for(lambda: executor.find("run-0-1") is None, "the Job to be cleared away")
    assert executor.poll([handle])[0].cause is Cause.LOST
    wait_for(lambda: not harness.cluster.objects.all("secrets"), "the Secret to go")


def test_a_job_cancelled_before_its_start(harness: KubernetesHarness, tmp_path: Path) -> None:
    executor = harness.executor()
    harness.cluster.kubelet.missing_images.add("replica:later")
    handle = launch(executor, "wait", tmp_path / "up", image="replica:later")
    executor.cancel([handle])
    status = end_of(executor, handle)
    assert (status.cause, status.exit_code) == (Cause.CANCELLED, None)
    harness.cluster.kubelet.missing_images.clear()
    assert launch(executor, "wait", tmp_path / "up") == handle
    assert end_of(executor, handle) == status
    assert not (tmp_path / "up").exists()


def test_a_cancelled_job_is_ending_until_its_end(
    harness: KubernetesHarness, tmp_path: Path
) -> None:
    executor = harness.executor(grace_s=600)
    handle = launch(executor, "deaf", tmp_path / "up")
    pid = number_in(tmp_path / "up")
    executor.cancel([handle])
    (pod,) = harness.cluster.pods("run-0-1")
    wait_for(lambda: "deletionTimestamp" in pod["metadata"], "the cluster to end it")
    (status,) = executor.poll([handle])
    assert (status.state, status.phase) == (JobState.RUNNING, "Ending") and not is_gone(pid)
    assert executor.live() == [handle]
    os.kill(pid, signal.SIGKILL)
    assert end_of(executor, handle).cause is Cause.CANCELLED
