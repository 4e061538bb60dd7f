"""The control plane against an emulated cluster: what a launch that died left is completed by the
next ticks. No pod runs: its image cannot be pulled, or its queue holds it."""

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
from tests.executors.kubernetes.world import KubernetesWorld
from tests.executors.worlds import wait_for

pytestmark = [pytest.mark.django_db, pytest.mark.processes]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KubernetesWorld]:
    with KubernetesWorld(tmp_path / "cluster") as opened:
        opened.cluster.kubelet.missing_images.add("replica:1")
        yield opened


@pytest.fixture
def kubernetes(
    executor: Any, cluster: KubernetesWorld, monkeypatch: pytest.MonkeyPatch
) -> KubernetesExecutor:
    """In the place of the fake; replicas get a secret."""
    from runs.credentials import Opened
    from runs.reconcile import launch

    made = cluster.executor()
    for module in ("reconcile.launch", "reconcile.jobs"):
        monkeypatch.setattr(f"runs.{module}.executor_for", lambda pool: made)
    secrets = Opened(environment={"TOKEN": "s3cr3t-2b7a"})
    monkeypatch.setattr(launch, "replica_secrets", lambda *args, **more: secrets)
    return made


def tick(world: Any, after_s: float = 7.0) -> None:
    """The reconciler's, and the launches that it calls for."""
    world.tick(after_s)
    world.work()


def interrupted_world(make_world: Any, cluster: KubernetesWorld, at: int, how: Interruption) -> Any:
    cluster.interrupt(at, how)
    try:
        world = make_world(replicas=1)
    finally:
        cluster.restore()
    return world


@pytest.mark.parametrize("how", Interruption)
@pytest.mark.parametrize("at", range(3))
def test_a_launch_interrupted_at_any_request_is_completed_by_the_next_ticks(
    make_world: Any,
    kubernetes: KubernetesExecutor,
    cluster: KubernetesWorld,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    how: Interruption,
) -> None:
    from tests.runs.conftest import World

    real = World.work

    def work(world: Any) -> None:
        try:
            real(world)
        except LaunchLater:
            world.run.refresh_from_db()

    monkeypatch.setattr(World, "work", work)
    world = interrupted_world(make_world, cluster, at, how)
    for _ in range(5):  # the breaker lets one failure pass
        tick(world)
    (attempt,) = world.replica(0).attempts.all()
    assert attempt.is_complete and attempt.ended_at is None
    assert len(cluster.cluster.objects.all("jobs")) == 1
    assert cluster.incomplete() == [] and cluster.left_behind() == []


def test_a_secret_that_vanished_is_made_again(
    make_world: Any, kubernetes: KubernetesExecutor, cluster: KubernetesWorld
) -> None:
    world = make_world(replicas=1)
    key = world.key(0)
    handle = kubernetes.find(key)
    assert handle is not None
    wait_for(lambda: kubernetes.poll([handle])[0].pending is PendingCause.IMAGE, "its image")
    cluster.cluster.objects.remove("secrets", "default", handle.data["name"])
    cluster.cluster.kubelet.missing_images.clear()
    wait_for(lambda: kubernetes.poll([handle])[0].pending is PendingCause.INCOMPLETE, "its Secret")
    world.tick(12)
    cluster.cluster.kubelet.missing_images.add("replica:1")  # nothing runs in this test
    replica = world.replica(0)
    assert replica.state == ReplicaState.PROVISIONING
    assert "CreateContainerConfigError" in replica.state_reason
    for _ in range(3):
        tick(world, 12)
    assert cluster.incomplete() == []
    assert replica.attempts.count() == 1


def test_a_replica_in_a_queue_waits_for_days_and_is_shown_so(
    make_world: Any,
    kubernetes: KubernetesExecutor,
    cluster: KubernetesWorld,
) -> None:
    cluster.cluster.add_queue("research", 0)
    kubernetes.config.options["labels"] = {QUEUE_LABEL: "research"}  # type: ignore[index]
    world = make_world(replicas=1)
    for _ in range(3):
        tick(world, 24 * 3600)
    replica = world.replica(0)
    assert replica.state == ReplicaState.PROVISIONING and replica.restarts == 0
    assert replica.backend_state == "Suspended (waiting for admission)"
    assert "queue research has not admitted it" in replica.state_reason
    assert replica.attempts.count() == 1


def test_a_missing_namespace_blocks_the_pool_and_names_it(
    make_world: Any,
    kubernetes: KubernetesExecutor,
    cluster: KubernetesWorld,
) -> None:
    kubernetes.cluster.namespace = "nowhere"
    world = make_world(replicas=1)
    replica = world.replica(0)
    assert replica.state == ReplicaState.RESTARTING, "it waits for an operator"
    assert replica.pool.needs_person and "namespace nowhere" in replica.pool.trouble
