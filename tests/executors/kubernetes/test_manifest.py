"""The objects of one attempt: their schemas and their content."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from executors.base import JobRequest, LaunchRefused, ReplicaSpec
from executors.kubernetes.hardware import PRODUCTS, TABLE
from executors.kubernetes.manifest import cancellation, completion, job, merged, name_of, secret
from executors.kubernetes.options import QUEUE_LABEL, Options, machine
from executors.launching import job_options
from executors.options import options_of

SCHEMAS = sorted((Path(__file__).parent / "data").glob("*.json"))
LABELS = {"archipelago-deployment": "ours", "archipelago-key": "run-0-1", "a": "b_C.d"}

EVERYTHING: dict[str, Any] = {
    "namespace": "training",
    "context": "big",
    "autoscaled": True,
    "poll_s": 1,
    "answer_s": 10,
    "image": "registry.example/replica:1",
    "python": "/opt/venv/bin/python",
    "labels": {"team": "vision", "kueue.x-k8s.io/queue-name": "research"},
    "node_selector": {"pool": "training"},
    "tolerations": [{"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"}],
    "spot": {
        "node_selector": {"cloud.google.com/gke-spot": "true"},
        "tolerations": [{"key": "cloud.google.com/gke-spot", "operator": "Exists"}],
    },
    "hardware": {
        "slice": {"gpus": 1, "gpu_resource": "nvidia.com/mig-3g.40gb", "requests": {"cpu": 4}}
    },
    "requests": {"cpu": "8", "memory": "64Gi"},
    "limits": {"memory": "64Gi", "ephemeral-storage": "100Gi"},
    "shared_memory": "16Gi",
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    "volume_mounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
    "image_pull_secrets": ["registry"],
    "service_account": "replica",
    "priority_class": "low",
    "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
    "grace_s": 60,
    "keep_s": 3600,
    "pod": {"runtimeClassName": "nvidia", "securityContext": {"runAsNonRoot": True}},
    "container": {"securityContext": {"allowPrivilegeEscalation": False}},
}


def made(
    options: dict[str, Any] | None = None, *, own: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    """A Job with ``options`` of the executor and ``own`` options of the spec."""
    wanted = ReplicaSpec(launch_key="run-0-1", replica=0, options=own or {}, **spec)
    reported = job_options(Options, {"image": "replica:1", **(options or {})}, wanted.options)
    return job(
        name_of("ours", wanted.launch_key),
        JobRequest(
            spec=wanted,
            entrypoint="diloco.replica",
            args=["s3://bucket/run"],
            env={"REPLICA_RANK": "0"},
            secrets={"AWS_SECRET_ACCESS_KEY": "s3cr3t"},
        ),
        options=reported,
        machine=machine(reported, wanted),
        labels=LABELS,
    )


def pod_of(made: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = made["spec"]["template"]["spec"]
    return pod


def faults(schema: Path, kind: str, document: dict[str, Any]) -> list[str]:
    published = json.loads(schema.read_text())
    validator = Draft202012Validator({"$ref": f"#/$defs/{kind}", **published})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def test_three_versions_are_here() -> None:
    assert [schema.stem for schema in SCHEMAS] == ["1.28", "1.33", "1.37"]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.stem)
@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({}, {}),
        ({}, {"hardware": "H100:8", "timeout_s": 3600, "region": "eu-north-1"}),
        (EVERYTHING, {"hardware": "gpu:2", "spot": True, "image": "other:2"}),
        (EVERYTHING, {"hardware": "slice"}),
    ],
    ids=["least", "gpus", "everything", "slice"],
)
def test_jobs_match_the_published_schema(
    schema: Path, options: dict[str, Any], spec: dict[str, Any]
) -> None:
    assert faults(schema, "job", made(options, **spec)) == []


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.stem)
def test_secrets_match_the_published_schema(schema: Path) -> None:
    result = secret("run-0-1-x", job_uid="b7f0", labels=LABELS, values={"TOKEN": "s3cr3t ü"})
    assert faults(schema, "secret", result) == []
    assert base64.b64decode(result["data"]["TOKEN"]).decode() == "s3cr3t ü"


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.stem)
def test_cancelled_jobs_match_the_published_schema(schema: Path) -> None:
    assert faults(schema, "job", merged(made(), cancellation())) == []


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.stem)
def test_the_schemas_refuse_invalid_objects(schema: Path) -> None:
    for change in (
        lambda job: job["spec"].update(backoffLimits=0),
        lambda job: job["spec"].update(backoffLimit="0"),
        lambda job: pod_of(job)["containers"][0].pop("name"),
        lambda job: pod_of(job)["volumes"][0]["emptyDir"].update(size="1Gi"),
        lambda job: job["spec"]["podFailurePolicy"]["rules"][1].update(onExitCode={}),
    ):
        wrong = copy.deepcopy(made())
        change(wrong)
        assert faults(schema, "job", wrong) != []


def test_an_attempt_is_one_pod_without_retries() -> None:
    spec = made()["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (1, 1, 0)
    assert pod_of(made())["restartPolicy"] == "Never"
    # Only cancelled Jobs have their own deadline.
    assert "activeDeadlineSeconds" not in spec
    assert "activeDeadlineSeconds" not in pod_of(made())
    assert pod_of(made(timeout_s=59.2))["activeDeadlineSeconds"] == 60


def test_a_disruption_precedes_the_exit_code() -> None:
    first, second = made()["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in (first, second)] == ["FailJob", "FailJob"]
    assert first["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert second["onExitCodes"]["containerName"] == pod_of(made())["containers"][0]["name"]


def test_secrets_are_only_referred_to() -> None:
    result = made()
    name = result["metadata"]["name"]
    (container,) = pod_of(result)["containers"]
    assert container["env"] == [
        {"name": "REPLICA_RANK", "value": "0"},
        {
            "name": "AWS_SECRET_ACCESS_KEY",
            "valueFrom": {"secretKeyRef": {"name": name, "key": "AWS_SECRET_ACCESS_KEY"}},
        },
    ]
    held = secret(name, job_uid="b7f0", labels=LABELS, values={})
    assert held["metadata"]["name"] == name
    (owner,) = held["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", name, "b7f0")


@pytest.mark.parametrize(("options", "limit"), [({}, None), (EVERYTHING, "16Gi")])
def test_shared_memory_is_as_large_as_it_needs(options: dict[str, Any], limit: str | None) -> None:
    pod = pod_of(made(options))
    (volume,) = [each for each in pod["volumes"] if "emptyDir" in each]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert volume["emptyDir"].get("sizeLimit") == limit
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["/dev/shm"] == volume["name"]


def test_options_arrive_in_the_pod() -> None:
    result = made(EVERYTHING, hardware="H100:4", spot=True, region="eu-north-1")
    pod = pod_of(result)
    assert pod["nodeSelector"] == {
        "pool": "training",
        "topology.kubernetes.io/region": "eu-north-1",
        "cloud.google.com/gke-spot": "true",
    }
    assert [toleration["key"] for toleration in pod["tolerations"]] == [
        "team",
        "nvidia.com/gpu",
        "cloud.google.com/gke-spot",
    ]
    assert pod["containers"][0]["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "ephemeral-storage": "100Gi", "nvidia.com/gpu": "4"},
    }
    affinity = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    ((match,),) = [term["matchExpressions"] for term in affinity["nodeSelectorTerms"]]
    assert (match["operator"], tuple(match["values"])) == ("In", PRODUCTS["H100"])
    assert pod["serviceAccountName"] == "replica" and pod["priorityClassName"] == "low"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["containers"][0]["securityContext"] == {"allowPrivilegeEscalation": False}
    assert pod["terminationGracePeriodSeconds"] == 60
    assert result["spec"]["ttlSecondsAfterFinished"] == 3600
    assert result["spec"]["template"]["metadata"]["labels"] == {**LABELS, "team": "vision"}
    # It enters its queue once its Secret exists.
    assert result["metadata"]["labels"] == {**LABELS, "team": "vision"}
    assert result["spec"]["suspend"] is True
    queue = {"metadata": {"labels": {QUEUE_LABEL: "research"}}}
    assert merged(completion("research"), queue) == completion("research")


def test_options_of_a_job_replace_those_of_the_executor() -> None:
    result = made(EVERYTHING, own={"requests": {"cpu": "1"}, "image": "own:1"})
    (container,) = pod_of(result)["containers"]
    assert container["resources"]["requests"] == {"cpu": "1"}
    assert container["image"] == "own:1"
    (container,) = pod_of(made(EVERYTHING, image="spec:1", own={"image": "own:1"}))["containers"]
    assert container["image"] == "spec:1"


@pytest.mark.parametrize("hardware", [each.name for each in TABLE.hardware])
def test_all_hardware_of_the_catalogue_can_be_requested(hardware: str) -> None:
    wanted = TABLE.hardware[[each.name for each in TABLE.hardware].index(hardware)]
    limits = pod_of(made(hardware=hardware))["containers"][0]["resources"]["limits"]
    assert limits == ({"nvidia.com/gpu": str(wanted.gpus)} if wanted.gpus else {})


def test_own_hardware_has_the_name_it_was_given() -> None:
    options = job_options(Options, EVERYTHING, {})
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, hardware="slice")
    result = machine(options, spec)
    assert (result.gpus, result.gpu_resource) == (1, "nvidia.com/mig-3g.40gb")
    assert result.requests == {"cpu": "4", "memory": "64Gi"}
    assert result.tolerations[-1]["key"] == "nvidia.com/mig-3g.40gb"


@pytest.mark.parametrize("key", ["a", "run-0-1", "x" * 63, "x" * 51 + "-" + "y" * 11])
def test_names_are_valid_names_of_jobs(key: str) -> None:
    name = name_of("ours", key)
    assert len(name) <= 63 and name.startswith(key[:40]) and "--" not in name
    assert name == name_of("ours", key)
    assert len({name, name_of("theirs", key), name_of("ours", "another")}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"imagee": "x"}, "expected namespace, .*, found imagee"),
        ({"image": 3}, "image: expected a text, found 3"),
        ({"node_selector": ["a"]}, "node_selector: expected a mapping"),
        ({"node_selector": {"a": True}}, "node_selector: expected a mapping"),
        ({"tolerations": {"key": "a"}}, "tolerations: expected a list"),
        ({"spot": {"nodes": {}}}, "spot: expected a mapping of node_selector, tolerations"),
        ({"hardware": {"a": {"gpus": "1"}}}, "hardware.a.gpus: expected a number of GPUs"),
        ({"hardware": ["a"]}, "hardware: expected a mapping"),
        ({"image_pull_secrets": "a"}, "image_pull_secrets: expected a list of texts"),
        ({"grace_s": 1.5}, "grace_s: expected a whole number of at least 0 s, found 1.5"),
        ({"keep_s": -1}, "keep_s: expected a whole number of at least 0 s, found -1"),
        ({"pod": {"containers": []}}, "pod: expected no containers"),
        ({"container": {"env": []}}, "container: expected no env"),
        ({"image": ""}, "image: expected the option image or an image of the job, found none"),
    ],
)
def test_invalid_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchRefused, match=message):
        made(options)


@pytest.mark.parametrize("hardware", ["", "H100:0", "H100:x", "h100", "gpu:", "any"])
def test_unknown_hardware_is_named(hardware: str) -> None:
    with pytest.raises(LaunchRefused, match=f"hardware: expected .*, found '{hardware}'"):
        made(hardware=hardware)


def test_a_jobs_options_cannot_move_it_elsewhere() -> None:
    with pytest.raises(LaunchRefused, match="namespace: expected in the executor's options"):
        made(own={"namespace": "other"})


def test_spot_requires_the_option_spot() -> None:
    with pytest.raises(LaunchRefused, match="spot: expected the option spot"):
        made(spot=True)


def test_invalid_labels_are_named() -> None:
    with pytest.raises(LaunchRefused, match=r"label a: .* found 'my run'"):
        wanted = ReplicaSpec(launch_key="run-0-1", replica=0)
        reported = job_options(Options, {"image": "x"}, {})
        job(
            "n",
            JobRequest(spec=wanted, entrypoint="module"),
            options=reported,
            machine=machine(reported, wanted),
            labels={"a": "my run"},
        )


def test_every_option_is_documented_and_every_limit_of_a_waiting_replica() -> None:
    text = (Path(__file__).parents[3] / "docs" / "backends" / "kubernetes.md").read_text()
    table = text.partition("## Options")[2].partition("## Kueue")[0]
    for option in options_of(Options):
        assert f"`{option}`" in table, option
    waits = text.partition("## While a replica waits")[2].partition("\n## ")[0]
    for reason in ("ErrImagePull", "CreateContainerConfigError", "Unschedulable", "exceeded quota"):
        assert reason in waits
    assert QUEUE_LABEL in text
