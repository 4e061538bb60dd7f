"""How an attempt on Kubernetes becomes complete, and why it waits before its start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from executors.base import (
    AccountError,
    Cause,
    ExecutorError,
    JobState,
    LaunchRefused,
    NoCapacity,
    PendingCause,
    ReplicaHandle,
    ReplicaStatus,
    RetryLater,
)
from executors.kubernetes.executor import KubernetesExecutor
from executors.kubernetes.options import QUEUE_LABEL
from tests.emulators import kubernetes_schema
from tests.emulators.interruptions import Interruption
from tests.emulators.kubernetes import GPU
from tests.executors.harnesses import end_of, launch, number_in, wait_for
from tests.executors.kubernetes.harness import KubernetesHarness
from tests.matrix import matrix

SECRET = {"TOKEN": "s3cr3t-1c9e"}
QUEUE = {QUEUE_LABEL: "research"}
ADMISSION = "Suspended (waiting for admission)"

pytestmark = pytest.mark.processes


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[KubernetesHarness]:
    with KubernetesHarness(tmp_path / "world") as opened:
        yield opened


def waits(executor: KubernetesExecutor, handle: ReplicaHandle, phase: str) -> ReplicaStatus:
    wait_for(lambda: executor.poll([handle])[0].phase == phase, phase)
    (status,) = executor.poll([handle])
    assert status.state is JobState.PENDING
    return status


# The Secret.


def test_one_failed_request_for_the_secret_is_repaired_by_the_next_call(
    harness: KubernetesHarness,
) -> None:
    executor = harness.executor()
    harness.interrupt(1, Interruption.REFUSED)
    with pytest.raises(RetryLater):
        launch(executor, "digests", "TOKEN", secrets=SECRET)
    harness.restore()
    handle = executor.find("run-0-1")
    assert handle is not None
    status = waits(executor, handle, "Incomplete")
    assert status.pending is PendingCause.INCOMPLETE
    assert harness.cluster.pods("run-0-1") == [], "no pod starts without its Secret"
    assert launch(executor, "digests", "TOKEN", secrets=SECRET) == handle
    assert end_of(executor, handle).cause is Cause.DONE


def test_a_pod_whose_secret_was_deleted_is_repaired_by_the_next_call(
    harness: KubernetesHarness, tmp_path: Path
) -> None:
    """Also a Job of an earlier version, which was created before its Secret."""
    executor = harness.executor()
    harness.cluster.kubelet.missing_images.add("replica:1")
    handle = launch(executor, "digests", "TOKEN", secrets=SECRET)
    waits(executor, handle, "ImagePullBackOff")
    name = harness.cluster.job("run-0-1")["metadata"]["name"]
    harness.cluster.objects.remove("secrets", "default", name)
    harness.cluster.kubelet.missing_images.clear()
    status = waits(executor, handle, "CreateContainerConfigError")
    assert status.pending is PendingCause.INCOMPLETE
    assert name in status.message
    assert launch(executor, "digests", "TOKEN", secrets=SECRET) == handle
    assert end_of(executor, handle).cause is Cause.DONE


def test_a_secret_of_an_interrupted_call_is_replaced_by_the_values_of_the_next(
    harness: KubernetesHarness,
) -> None:
    executor = harness.executor()
    harness.interrupt(1, Interruption.KILLED_AFTER)
    with pytest.raises(ExecutorError):
        launch(executor, "env", secrets={"TOKEN": "expired"})
    harness.restore()
    handle = launch(executor, "env", secrets={"TOKEN": "fresh"})
    end_of(executor, handle)
    text = "".join(line.text for line in executor.logs(handle))
    assert "fresh" in text and "expired" not in text


def test_a_running_pod_keeps_its_secret(harness: KubernetesHarness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up", secrets=SECRET)
    number_in(tmp_path / "up")
    (before,) = harness.cluster.objects.all("secrets")
    launch(executor, "wait", tmp_path / "up", secrets={"TOKEN": "another"})
    assert harness.cluster.objects.all("secrets") == [before]
    executor.cancel([handle])
    end_of(executor, handle)


def test_an_incomplete_job_that_is_cancelled_ends_and_is_cleared_away(
    harness: KubernetesHarness,
) -> None:
    executor = harness.executor(keep_s=0)
    harness.interrupt(1, Interruption.KILLED_BEFORE)
    with pytest.raises(ExecutorError):
        launch(executor, "digests", "TOKEN", secrets=SECRET)
    harness.restore()
    handles = executor.live()
    assert len(handles) == 1
    executor.cancel(handles)
    wait_for(lambda: not harness.cluster.objects.all("jobs"), "the Job to be cleared away")
    assert harness.cluster.objects.all("pods") == []


def test_a_cancelled_job_is_not_resumed_by_a_late_call(harness: KubernetesHarness) -> None:
    executor = harness.executor()
    harness.interrupt(1, Interruption.KILLED_BEFORE)
    with pytest.raises(ExecutorError):
        launch(executor, "digests", "TOKEN", secrets=SECRET)
    harness.restore()
    executor.cancel(executor.live())
    handle = launch(executor, "digests", "TOKEN", secrets=SECRET)
    assert end_of(executor, handle).cause is Cause.CANCELLED
    assert harness.cluster.objects.all("secrets") == []


# Kueue.


def test_a_queued_job_waits_for_its_admission_and_then_runs(
    harness: KubernetesHarness, tmp_path: Path
) -> None:
    harness.cluster.add_queue("research", 0)
    executor = harness.executor(labels={**QUEUE, "team": "blue"})
    handle = launch(executor, "wait", tmp_path / "up", secrets=SECRET)
    status = waits(executor, handle, ADMISSION)
    assert status.pending is PendingCause.QUEUED
    assert "research" in status.message
    assert harness.cluster.pods("run-0-1") == []
    harness.cluster.add_queue("research", 1)
    number_in(tmp_path / "up")
    (pod,) = harness.cluster.pods("run-0-1")
    assert pod["metadata"]["labels"]["team"] == "blue"
    assert QUEUE_LABEL not in pod["metadata"]["labels"], "Kueue would manage the pod itself"
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED


def test_a_job_without_secrets_is_queued_by_one_request(harness: KubernetesHarness) -> None:
    harness.cluster.add_queue("research", 1)
    executor = harness.executor(labels=QUEUE)
    assert end_of(executor, launch(executor, "exit", 0)).cause is Cause.DONE


@matrix("how", Interruption, fast=(Interruption.LOST,))
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_queued_job_is_not_admitted_before_its_secret_exists(
    harness: KubernetesHarness, at: int, how: Interruption
) -> None:
    harness.cluster.add_queue("research", 1)
    executor = harness.executor(labels=QUEUE)
    harness.interrupt(at, how)
    with pytest.raises(ExecutorError):
        launch(executor, "digests", "TOKEN", secrets=SECRET)
    harness.restore()
    if at == 1 and harness.cluster.objects.all("jobs"):
        assert harness.cluster.pods("run-0-1") == []
    handle = launch(executor, "digests", "TOKEN", secrets=SECRET)
    assert end_of(executor, handle).cause is Cause.DONE


def test_a_job_that_its_queue_preempts_waits_again_and_runs_again(
    harness: KubernetesHarness, tmp_path: Path
) -> None:
    harness.cluster.add_queue("research", 1)
    executor = harness.executor(labels=QUEUE)
    handle = launch(executor, "wait", tmp_path / "up", secrets=SECRET)
    first = number_in(tmp_path / "up")
    harness.cluster.add_queue("research", 0)
    harness.cluster.evict_from_queue("run-0-1")
    assert waits(executor, handle, ADMISSION).pending is PendingCause.QUEUED
    harness.cluster.add_queue("research", 1)
    wait_for(lambda: number_in(tmp_path / "up") != first, "a new pod")
    executor.cancel([handle])
    end_of(executor, handle)


def test_a_job_that_is_cancelled_in_its_queue_leaves_it(harness: KubernetesHarness) -> None:
    harness.cluster.add_queue("research", 0)
    executor = harness.executor(labels=QUEUE)
    handle = launch(executor, "exit", 0, secrets=SECRET)
    waits(executor, handle, ADMISSION)
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED
    assert executor.live() == []
    assert QUEUE_LABEL not in harness.cluster.job("run-0-1")["metadata"]["labels"]


def test_a_job_that_is_cancelled_with_quota_reserved_ends_once_it_is_let_go(
    harness: KubernetesHarness,
) -> None:
    harness.cluster.add_queue("research", 1)
    harness.cluster.controllers.kueue.checks_pending = True
    executor = harness.executor(labels=QUEUE)
    handle = launch(executor, "exit", 0, secrets=SECRET)
    waits(executor, handle, ADMISSION)
    wait_for(lambda: harness.cluster.controllers.kueue._admitted, "its quota to be reserved")
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED
    assert executor.live() == []
    harness.cluster.controllers.kueue.checks_pending = False
    wait_for(lambda: not harness.cluster.controllers.kueue._admitted, "its quota to be released")
    assert end_of(executor, handle).cause is Cause.CANCELLED
    assert harness.cluster.pods("run-0-1") == []


# Capacity, quota, namespaces, images.


def test_a_full_quota_for_secrets_leaves_the_job_suspended_until_there_is_room(
    harness: KubernetesHarness,
) -> None:
    executor = harness.executor()
    first = launch(executor, "exit", 0, secrets=SECRET)
    end_of(executor, first)
    harness.cluster.add_quota("secrets", {"count/secrets": "1"})
    with pytest.raises(NoCapacity):
        launch(executor, "digests", "TOKEN", key="run-1-1", secrets=SECRET)
    handle = executor.find("run-1-1")
    assert handle is not None
    waits(executor, handle, "Incomplete")
    harness.lose(first)  # deleted with its Secret
    wait_for(lambda: not harness.cluster.objects.all("secrets"), "its Secret to go")
    launch(executor, "digests", "TOKEN", key="run-1-1", secrets=SECRET)
    assert end_of(executor, handle).cause is Cause.DONE


def test_a_full_quota_is_retried_and_a_quota_of_zero_needs_an_operator(
    harness: KubernetesHarness, tmp_path: Path
) -> None:
    executor = harness.executor()
    harness.cluster.add_quota("jobs", {"count/jobs.batch": "1"})
    first = launch(executor, "wait", tmp_path / "up")
    with pytest.raises(NoCapacity, match="exceeded quota: jobs"):
        launch(executor, "exit", 0, key="run-1-1")
    executor.cancel([first])
    end_of(executor, first)
    harness.cluster.objects.remove("resourcequotas", "default", "jobs")
    harness.cluster.add_quota("none", {"count/jobs.batch": "0"})
    with pytest.raises(AccountError, match="limit is below what one replica requests"):
        launch(executor, "exit", 0, key="run-2-1")


@pytest.mark.parametrize(
    ("hard", "cause"), [("8", PendingCause.QUOTA), ("2", PendingCause.REFUSED)]
)
def test_a_quota_for_pods_is_read_from_the_warning_of_the_job(
    harness: KubernetesHarness,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hard: str,
    cause: PendingCause,
) -> None:
    monkeypatch.setattr("executors.kubernetes.executor.UNEXPLAINED_S", -1.0)
    harness.cluster.add_node("gpu-2", gpus=8)
    executor = harness.executor()
    first = launch(executor, "wait", tmp_path / "up", hardware="gpu:6")
    number_in(tmp_path / "up")
    harness.cluster.add_quota("gpus", {f"requests.{GPU}": hard})
    handle = launch(executor, "exit", 0, key="run-1-1", hardware="gpu:4")
    wait_for(lambda: executor.poll([handle])[0].pending is cause, cause)
    assert "exceeded quota: gpus" in executor.poll([handle])[0].message
    executor.cancel([first, handle])
    executor.collect([first, handle], 60)


def test_a_missing_namespace_needs_an_operator_and_is_named(harness: KubernetesHarness) -> None:
    executor = harness.executor(namespace="nowhere")
    with pytest.raises(AccountError, match=r"namespace nowhere of .* does not exist: create it"):
        launch(executor, "exit", 0, secrets=SECRET)
    harness.cluster.add_namespace("nowhere")
    assert end_of(executor, launch(executor, "exit", 0, secrets=SECRET)).cause is Cause.DONE


def test_a_namespace_that_is_being_deleted_needs_an_operator(harness: KubernetesHarness) -> None:
    harness.cluster.objects.terminating.add("default")
    with pytest.raises(AccountError, match="because it is being terminated"):
        launch(harness.executor(), "exit", 0)


@pytest.mark.parametrize(
    ("image", "phase"), [("gone:1", "ImagePullBackOff"), ("Not An Image", "InvalidImageName")]
)
def test_an_image_that_cannot_be_pulled_is_the_cause(
    harness: KubernetesHarness, image: str, phase: str
) -> None:
    harness.cluster.kubelet.missing_images.add("gone:1")
    executor = harness.executor(image=image)
    handle = launch(executor, "exit", 0)
    status = waits(executor, handle, phase)
    assert status.pending is PendingCause.IMAGE
    assert image in status.message


def test_a_job_that_no_node_takes_waits_for_capacity(harness: KubernetesHarness) -> None:
    executor = harness.executor(node_selector={"zone": "none"})
    handle = launch(executor, "exit", 0)
    assert waits(executor, handle, "Unschedulable").pending is PendingCause.CAPACITY


def test_retry_after_is_read_as_a_date_too(harness: KubernetesHarness) -> None:
    harness.cluster.fail(429, "slow down", after_s="Thu, 01 Jan 2099 00:00:00 GMT")
    with pytest.raises(RetryLater) as caught:
        launch(harness.executor(), "exit", 0)
    assert caught.value.after_s == 3600.0


# Refusals of the emulated API server


def test_a_field_that_the_schema_does_not_have_is_refused(harness: KubernetesHarness) -> None:
    with pytest.raises(LaunchRefused, match="hostNetwrk"):  # by the client already
        launch(harness.executor(pod={"hostNetwrk": True}), "exit", 0)
    job = {"spec": {"suspnd": True, "template": {"spec": {"containers": [{"imag": "x"}]}}}}
    assert kubernetes_schema.problems("jobs", job, is_patch=True) == [
        'unknown field "spec.suspnd"',
        'unknown field "spec.template.spec.containers[0].imag"',
    ]
    (problem,) = kubernetes_schema.problems("secrets", {"immutable": "yes"})
    assert "immutable" in problem


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": {"team": "not a label"}}, "labels team: expected at most 63"),
        ({"labels": {"-team": "blue"}}, "labels: expected keys of the form"),
        ({"labels": {"archipelago-key": "x"}}, "that Archipelago or Kubernetes itself sets"),
        ({"labels": {"job-name": "x"}}, "that Archipelago or Kubernetes itself sets"),
        ({"labels": {"batch.kubernetes.io/job-name": "x"}}, "itself sets"),
        ({"labels": {QUEUE_LABEL: "Not_A_Queue"}}, "the name of a LocalQueue"),
        ({"labels": ["team"]}, "labels: expected a mapping"),
        ({"annotations": {"archipelago-complete": "true"}}, "itself sets"),
        ({"annotations": {"a b": "x"}}, "annotations: expected keys of the form"),
        ({"annotations": {"big": "x" * 300_000}}, "annotations: expected at most"),
    ],
)
def test_labels_and_annotations_are_checked(
    harness: KubernetesHarness, options: dict[str, object], message: str
) -> None:
    with pytest.raises(LaunchRefused, match=message):
        launch(harness.executor(), "exit", 0, options=options)
    assert harness.cluster.objects.all("jobs") == []


def test_labels_and_annotations_are_on_job_and_pod(
    harness: KubernetesHarness, tmp_path: Path
) -> None:
    given = {"labels": {"team": "blue"}, "annotations": {"example.com/note": "any text, of 1"}}
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up", options=given)
    number_in(tmp_path / "up")
    (pod,) = harness.cluster.pods("run-0-1")
    for made in (harness.cluster.job("run-0-1"), pod):
        assert made["metadata"]["labels"]["team"] == "blue"
        assert made["metadata"]["annotations"]["example.com/note"] == "any text, of 1"
    executor.cancel([handle])
    end_of(executor, handle)
