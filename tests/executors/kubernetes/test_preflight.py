"""What a cluster tells before anything is started: rights, its own checks, quotas, nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executors.base import Problem, ReplicaSpec
from executors.kubernetes.client import RIGHTS, USEFUL_RIGHTS
from tests.emulators.kubernetes import GPU, USER
from tests.executors.kubernetes.world import KubernetesWorld

SPEC = ReplicaSpec(launch_key="run-0-1", replica=0, hardware="H100:4")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KubernetesWorld]:
    with KubernetesWorld(tmp_path) as opened:
        yield opened


def problems(world: KubernetesWorld, count: int = 1, **options: Any) -> list[Problem]:
    spec = options.pop("spec", SPEC)
    found = world.executor(**options).preflight(spec, count)
    assert world.executor().live() == []
    return found


def test_nothing_is_wrong_with_what_fits(world: KubernetesWorld) -> None:
    assert problems(world, 2) == []


@pytest.mark.parametrize("right", RIGHTS, ids=lambda right: f"{right[2]} {right[1]}")
def test_a_missing_right_is_named(world: KubernetesWorld, right: tuple[str, str, str]) -> None:
    world.cluster.rights[USER] = {*RIGHTS, *USEFUL_RIGHTS} - {right}
    (problem,) = world.executor().preflight(SPEC, 1)
    assert problem.field == "credential"
    assert f"expected to be allowed to {right[2]} {right[1]} in namespace default" in (
        problem.message
    )


def test_useful_rights_are_not_needed(world: KubernetesWorld) -> None:
    world.cluster.rights[USER] = set(RIGHTS)
    assert problems(world) == []


def test_a_credential_nobody_knows_is_named(world: KubernetesWorld) -> None:
    executor = world.executor(credentials=dict(world.wrong_credentials))
    (problem,) = executor.preflight(SPEC, 1)
    assert (problem.field, problem.message) == ("credential", "Unauthorized")


def test_what_the_api_refuses_is_told_in_its_words(world: KubernetesWorld) -> None:
    mounts = [{"name": "data", "mountPath": "/data"}]
    (problem,) = problems(world, volume_mounts=mounts)
    assert problem.field == "options"
    assert 'volumeMounts.name: Not found: "data"' in problem.message


def test_what_the_client_refuses_is_told_too(world: KubernetesWorld) -> None:
    (problem,) = problems(world, pod={"runtimeClasName": "nvidia"})
    assert problem.field == "options"
    assert "spec.template.spec.runtimeClasName: Extra inputs" in problem.message


@pytest.mark.parametrize(
    ("hard", "count", "said"),
    [
        ({f"requests.{GPU}": "8"}, 2, None),
        ({f"requests.{GPU}": "8"}, 3, "expected 12 of requests.nvidia.com/gpu for 3, found 8 left"),
        ({"pods": "1"}, 2, "quota training: expected 2 of pods for 2, found 1 left of 1"),
        ({"count/jobs.batch": "1"}, 2, "expected 2 of count/jobs.batch for 2, found 1 left of 1"),
        ({"requests.cpu": "1500m"}, 1, None),
        ({"requests.cpu": "1500m"}, 2, "expected 2 of requests.cpu for 2, found 1.5 left of 1500m"),
        ({"limits.memory": "3Gi"}, 2, "of limits.memory for 2, found 3221225472 left of 3Gi"),
        # A request that is not given is the limit.
        ({"requests.memory": "3Gi"}, 2, "of requests.memory for 2, found 3221225472 left of 3Gi"),
    ],
)
def test_quotas(world: KubernetesWorld, hard: dict[str, str], count: int, said: str | None) -> None:
    world.cluster.add_quota("training", hard)
    found = problems(world, count, autoscaled=True, requests={"cpu": "1"}, limits={"memory": "2Gi"})
    assert len(found) == (said is not None)
    for problem in found:
        assert problem.field == "hardware" and said is not None and said in problem.message


def test_a_quota_for_some_pods_only_says_nothing(world: KubernetesWorld) -> None:
    world.cluster.add_quota("some", {"pods": "0"})
    (quota,) = world.cluster.objects.all("resourcequotas")
    quota["spec"]["scopes"] = ["BestEffort"]
    assert problems(world, autoscaled=True) == []


@pytest.mark.parametrize(
    ("hardware", "count", "options", "said"),
    [
        ("cpu", 100, {}, None),
        ("gpu:8", 1, {}, None),
        ("gpu:8", 2, {}, "room for 2 pods of 8 nvidia.com/gpu, found nodes for 1 at once"),
        ("gpu:16", 1, {}, "expected a schedulable node with 16 nvidia.com/gpu, found none of 2"),
        ("L4", 1, {}, "labelled nvidia.com/gpu.product NVIDIA-L4, found none"),
        ("L4", 1, {"autoscaled": True}, None),
        ("gpu", 1, {"gpu_resource": "amd.com/gpu"}, "1 amd.com/gpu, found none of 2 nodes"),
        ("cpu", 1, {"node_selector": {"pool": "x"}}, "labels {'pool': 'x'}, found none"),
    ],
)
def test_nodes(
    world: KubernetesWorld, hardware: str, count: int, options: dict[str, Any], said: str | None
) -> None:
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, hardware=hardware)
    found = problems(world, count, spec=spec, **options)
    assert len(found) == (said is not None)
    for problem in found:
        assert problem.field == "hardware" and said is not None and said in problem.message


def test_a_node_with_a_taint_is_only_for_who_tolerates_it(world: KubernetesWorld) -> None:
    world.cluster.remove_node("cpu-1")
    world.cluster.remove_node("gpu-1")
    world.cluster.add_node("special", gpus=8, taints=["team"])
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, hardware="gpu")
    (problem,) = problems(world, spec=spec)
    assert "found none of 1 nodes" in problem.message
    for toleration in (
        {"key": "team", "operator": "Exists"},
        {"operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "", "effect": "NoSchedule"},
    ):
        assert problems(world, spec=spec, tolerations=[toleration]) == []
    for wrong in (
        {"key": "team", "operator": "Equal", "value": "b"},
        {"key": "team", "operator": "Exists", "effect": "NoExecute"},
    ):
        assert len(problems(world, spec=spec, tolerations=[wrong])) == 1


def test_the_region_is_the_nodes(world: KubernetesWorld) -> None:
    here = ReplicaSpec(launch_key="run-0-1", replica=0, region="emulated-1")
    away = ReplicaSpec(launch_key="run-0-1", replica=0, region="moon")
    assert problems(world, spec=here) == []
    (problem,) = problems(world, spec=away)
    assert problem.field == "region" and "expected one of emulated-1" in problem.message


def test_spot_is_a_kind_of_node(world: KubernetesWorld) -> None:
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, hardware="gpu", spot=True)
    (problem,) = problems(world, spec=spec)
    assert problem.field == "spot"
    spot = {"node_selector": {"cloud.google.com/gke-spot": "true"}}
    assert problems(world, spec=spec, spot=spot) == []
    assert world.executor(spot=spot).capabilities.spot
    assert not world.executor().capabilities.spot
