"""The preflight on a cluster: permissions, dry run, quotas and nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executors.base import Problem, ReplicaSpec
from executors.kubernetes.client import RIGHTS, USEFUL_RIGHTS
from tests.emulators.kubernetes import GPU, USER
from tests.executors.kubernetes.harness import KubernetesHarness

SPEC = ReplicaSpec(launch_key="run-0-1", replica=0, hardware="H100:4")


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[KubernetesHarness]:
    with KubernetesHarness(tmp_path) as opened:
        yield opened


def problems(harness: KubernetesHarness, count: int = 1, **options: Any) -> list[Problem]:
    spec = options.pop("spec", SPEC)
    result = harness.executor(**options).preflight(spec, count)
    assert harness.executor().live() == []
    return result


def test_a_fitting_request_has_no_problems(harness: KubernetesHarness) -> None:
    assert problems(harness, 2) == []


@pytest.mark.parametrize("right", RIGHTS, ids=lambda right: f"{right[2]} {right[1]}")
def test_a_missing_right_is_named(harness: KubernetesHarness, right: tuple[str, str, str]) -> None:
    harness.cluster.rights[USER] = {*RIGHTS, *USEFUL_RIGHTS} - {right}
    (problem,) = harness.executor().preflight(SPEC, 1)
    assert problem.field == "credential"
    assert f"expected to be allowed to {right[2]} {right[1]} in namespace default" in (
        problem.message
    )


def test_useful_rights_are_not_needed(harness: KubernetesHarness) -> None:
    harness.cluster.rights[USER] = set(RIGHTS)
    assert problems(harness) == []


def test_an_unknown_credential_is_named(harness: KubernetesHarness) -> None:
    executor = harness.executor(credentials=dict(harness.wrong_credentials))
    (problem,) = executor.preflight(SPEC, 1)
    assert (problem.field, problem.message) == ("credential", "Unauthorized")


def test_a_refusal_of_the_api_has_its_message(harness: KubernetesHarness) -> None:
    mounts = [{"name": "data", "mountPath": "/data"}]
    (problem,) = problems(harness, volume_mounts=mounts)
    assert problem.field == "options"
    assert 'volumeMounts.name: Not found: "data"' in problem.message


def test_a_refusal_of_the_client_has_its_message(harness: KubernetesHarness) -> None:
    (problem,) = problems(harness, pod={"runtimeClasName": "nvidia"})
    assert problem.field == "options"
    assert "spec.template.spec.runtimeClasName: Extra inputs" in problem.message


@pytest.mark.parametrize(
    ("hard", "count", "text"),
    [
        ({f"requests.{GPU}": "8"}, 2, None),
        ({f"requests.{GPU}": "8"}, 3, "expected 12 of requests.nvidia.com/gpu for 3, found 8 left"),
        ({"pods": "1"}, 2, "quota training: expected 2 of pods for 2, found 1 left of 1"),
        ({"count/jobs.batch": "1"}, 2, "expected 2 of count/jobs.batch for 2, found 1 left of 1"),
        ({"requests.cpu": "1500m"}, 1, None),
        ({"requests.cpu": "1500m"}, 2, "expected 2 of requests.cpu for 2, found 1.5 left of 1500m"),
        ({"limits.memory": "3Gi"}, 2, "of limits.memory for 2, found 3221225472 left of 3Gi"),
        # A missing request equals the limit.
        ({"requests.memory": "3Gi"}, 2, "of requests.memory for 2, found 3221225472 left of 3Gi"),
    ],
)
def test_quotas(
    harness: KubernetesHarness, hard: dict[str, str], count: int, text: str | None
) -> None:
    harness.cluster.add_quota("training", hard)
    result = problems(
        harness, count, autoscaled=True, requests={"cpu": "1"}, limits={"memory": "2Gi"}
    )
    assert len(result) == (text is not None)
    for problem in result:
        assert problem.field == "hardware" and text is not None and text in problem.message


def test_a_quota_with_scopes_is_ignored(harness: KubernetesHarness) -> None:
    harness.cluster.add_quota("some", {"pods": "0"})
    (quota,) = harness.cluster.objects.all("resourcequotas")
    quota["spec"]["scopes"] = ["BestEffort"]
    assert problems(harness, autoscaled=True) == []


@pytest.mark.parametrize(
    ("hardware", "count", "options", "text"),
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
    harness: KubernetesHarness, hardware: str, count: int, options: dict[str, Any], text: str | None
) -> None:
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, hardware=hardware)
    result = problems(harness, count, spec=spec, **options)
    assert len(result) == (text is not None)
    for problem in result:
        assert problem.field == "hardware" and text is not None and text in problem.message


def test_a_tainted_node_requires_a_toleration(harness: KubernetesHarness) -> None:
    harness.cluster.remove_node("cpu-1")
    harness.cluster.remove_node("gpu-1")
    harness.cluster.add_node("special", gpus=8, taints=["team"])
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, hardware="gpu")
    (problem,) = problems(harness, spec=spec)
    assert "found none of 1 nodes" in problem.message
    for toleration in (
        {"key": "team", "operator": "Exists"},
        {"operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "", "effect": "NoSchedule"},
    ):
        assert problems(harness, spec=spec, tolerations=[toleration]) == []
    for wrong in (
        {"key": "team", "operator": "Equal", "value": "b"},
        {"key": "team", "operator": "Exists", "effect": "NoExecute"},
    ):
        assert len(problems(harness, spec=spec, tolerations=[wrong])) == 1


def test_the_region_is_the_nodes(harness: KubernetesHarness) -> None:
    here = ReplicaSpec(launch_key="run-0-1", replica=0, region="emulated-1")
    away = ReplicaSpec(launch_key="run-0-1", replica=0, region="moon")
    assert problems(harness, spec=here) == []
    (problem,) = problems(harness, spec=away)
    assert problem.field == "region" and "expected one of emulated-1" in problem.message


def test_spot_is_a_kind_of_node(harness: KubernetesHarness) -> None:
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, hardware="gpu", spot=True)
    (problem,) = problems(harness, spec=spec)
    assert problem.field == "spot"
    spot = {"node_selector": {"cloud.google.com/gke-spot": "true"}}
    assert problems(harness, spec=spec, spot=spot) == []
    assert harness.executor(spot=spot).capabilities.spot
    assert not harness.executor().capabilities.spot
