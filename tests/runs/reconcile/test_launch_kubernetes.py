"""The control plane against an emulated cluster: the next ticks complete an interrupted launch. No
pod runs: its image cannot be pulled, or it is queued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executors.base import PendingCause
from executors.kubernetes.executor import KubernetesExecutor
from executors.kubernetes.options import QUEUE_LABEL
from runs.exceptions import LaunchLater
from runs.states import ReplicaState
from tests.emulators.interruptions import Interruption
from tests.executors.harnesses import wait_for
from tests.executors.kubernetes.harness import KubernetesHarness
from tests.matrix import matrix

pytestmark = [pytest.mark.django_db, pytest.mark.processes]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KubernetesHarness]:
    with KubernetesHarness(tmp_path / "cluster") as opened:
        opened.cluster.kubelet.missing_images.add("replica:1")
        yield opened


@pytest.fixture
def kubernetes(
    executor: Any, cluster: KubernetesHarness, monkeypatch: pytest.MonkeyPatch
) -> KubernetesExecutor:
    """Use the emulated cluster instead of the fake executor; replicas get a secret."""
    from runs.credentials import Opened
    from runs.reconcile import launch

    made = cluster.executor()
    for module in ("reconcile.launch", "reconcile.jobs"):
        monkeypatch.setattr(f"runs.{module}.executor_for", lambda pool: made)
    secrets = Opened(environment={"TOKEN": "s3cr3t-2b7a"})
    monkeypatch.setattr(launch, "replica_secrets", lambda *args, **more: secrets)
    return made


def tick(harness: Any, after_s: float = 7.0) -> None:
    """Run the reconciler and the launches that it enqueues."""
    harness.tick(after_s)
    harness.work()


def interrupted_harness(
    make_harness: Any, cluster: KubernetesHarness, at: int, how: Interruption
) -> Any:
    cluster.interrupt(at, how)
    try:
        harness = make_harness(replicas=1)
    finally:
        cluster.restore()
    return harness


@matrix("how", Interruption, fast=(Interruption.KILLED_AFTER,))
@matrix("at", range(3), fast=2)
def test_a_launch_interrupted_at_any_request_is_completed_by_the_next_ticks(
    make_harness: Any,
    kubernetes: KubernetesExecutor,
    cluster: KubernetesHarness,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    how: Interruption,
) -> None:
    from tests.runs.conftest import Harness

    real = Harness.work

    def work(harness: Any) -> None:
        try:
            real(harness)
        except LaunchLater:
            harness.run.refresh_from_db()

    monkeypatch.setattr(Harness, "work", work)
    harness = interrupted_harness(make_harness, cluster, at, how)
    for _ in range(5):  # the breaker lets one failure pass
        tick(harness)
    (attempt,) = harness.replica(0).attempts.all()
    assert attempt.is_complete and attempt.ended_at is None
    assert len(cluster.cluster.objects.all("jobs")) == 1
    assert cluster.incomplete() == [] and cluster.left_behind() == []


def test_a_deleted_secret_is_recreated(
    make_harness: Any, kubernetes: KubernetesExecutor, cluster: KubernetesHarness
) -> None:
    harness = make_harness(replicas=1)
    key = harness.key(0)
    handle = kubernetes.find(key)
    assert handle is not None
    wait_for(lambda: kubernetes.poll([handle])[0].pending is PendingCause.IMAGE, "its image")
    cluster.cluster.objects.remove("secrets", "default", handle.data["name"])
    cluster.cluster.kubelet.missing_images.clear()
    wait_for(lambda: kubernetes.poll([handle])[0].pending is PendingCause.INCOMPLETE, "its Secret")
    harness.tick(12)
    cluster.cluster.kubelet.missing_images.add("replica:1")  # nothing runs in this test
    replica = harness.replica(0)
    assert replica.state == ReplicaState.PROVISIONING
    assert "CreateContainerConfigError" in replica.state_reason
    for _ in range(3):
        tick(harness, 12)
    assert cluster.incomplete() == []
    assert replica.attempts.count() == 1


def test_a_queued_replica_waits_for_days_and_shows_the_reason(
    make_harness: Any,
    kubernetes: KubernetesExecutor,
    cluster: KubernetesHarness,
) -> None:
    cluster.cluster.add_queue("research", 0)
    kubernetes.config.options["labels"] = {QUEUE_LABEL: "research"}  # type: ignore[index]
    harness = make_harness(replicas=1)
    for _ in range(3):
        tick(harness, 24 * 3600)
    replica = harness.replica(0)
    assert replica.state == ReplicaState.PROVISIONING and replica.restarts == 0
    assert replica.backend_state == "Suspended (waiting for admission)"
    assert "queue research has not admitted it" in replica.state_reason
    assert replica.attempts.count() == 1


def test_a_missing_namespace_blocks_the_pool_and_names_it(
    make_harness: Any,
    kubernetes: KubernetesExecutor,
    cluster: KubernetesHarness,
) -> None:
    kubernetes.cluster.namespace = "nowhere"
    harness = make_harness(replicas=1)
    replica = harness.replica(0)
    assert replica.state == ReplicaState.RESTARTING, "it waits for an operator"
    assert replica.pool.requires_intervention and "namespace nowhere" in replica.pool.last_error
