"""Names, options and requests of SageMaker jobs, without requests to AWS."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from executors.base import (
    CodeRef,
    LaunchRefused,
    ReplicaSpec,
)
from executors.catalogue import Catalogue
from executors.options import read
from executors.sagemaker import entrypoint as sagemaker_step
from executors.sagemaker import hardware
from executors.sagemaker.client import Clients
from executors.sagemaker.logs import Position
from executors.sagemaker.options import Options
from executors.sagemaker.request import (
    IMAGE,
    create_request,
    job_name,
    key_of,
    name_prefix,
    options_of,
    output_path,
    split_command,
)

NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
SPEC = ReplicaSpec(launch_key="run-0-1", replica=0, hardware="ml.g5.xlarge", timeout_s=3600)
OPTIONS = Options(
    role_arn="arn:aws:iam::123456789012:role/replica",
    image="123456789012.dkr.ecr.us-east-1.amazonaws.com/replica:1",
)


def request(spec: ReplicaSpec = SPEC, options: Options = OPTIONS, **changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "name": "us--run-0-1",
        "command": ["python", "-m", "thing"],
        "env": {"A": "b"},
        "tags": {"archipelago-key": "run-0-1"},
        "output": "s3://bucket/out",
    }
    return create_request(spec, options, **{**given, **changed})


@pytest.mark.parametrize("deployment", ["archipelago", "a1b2c3d4", "My Lab_2", "-", "x" * 80, "ü"])
@pytest.mark.parametrize("key", ["0a1b2c3d4e5f-12-3", "a", "a--b", "k" * 63, "9-" * 31 + "9"])
def test_every_key_has_a_name_that_sagemaker_accepts(deployment: str, key: str) -> None:
    name = job_name(deployment, key)
    assert NAME.fullmatch(name) and len(name) <= 63
    assert name.startswith(name_prefix(deployment))
    assert key_of(deployment, name) in (key, None)


def test_names_are_unique_per_deployment() -> None:
    deployments = ["lab", "lab-2", "lab2", "LAB", "lab_", "lab-", "Lab", "x" * 30, "x" * 31]
    assert len({name_prefix(deployment) for deployment in deployments}) == len(deployments)
    # No prefix begins another: the jobs of one deployment are listed by it.
    for one in deployments:
        for other in deployments:
            assert one == other or not job_name(other, "k").startswith(name_prefix(one))
    long = ["k" * 62 + end for end in "abc"]
    assert len({job_name("lab", key) for key in long}) == 3


def test_a_short_key_is_read_in_the_name() -> None:
    assert job_name("a1b2c3d4", "0a1b2c3d4e5f-12-3") == "a1b2c3d4--0a1b2c3d4e5f-12-3"
    assert key_of("a1b2c3d4", "a1b2c3d4--0a1b2c3d4e5f-12-3") == "0a1b2c3d4e5f-12-3"


def test_the_request() -> None:
    assert request() == {
        "TrainingJobName": "us--run-0-1",
        "AlgorithmSpecification": {
            "TrainingImage": OPTIONS.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["python"],
            "ContainerArguments": ["-m", "thing"],
        },
        "RoleArn": OPTIONS.role_arn,
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
        "ResourceConfig": {
            "InstanceType": "ml.g5.xlarge",
            "InstanceCount": 1,
            "VolumeSizeInGB": 50,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        "EnableManagedSpotTraining": False,
        "Environment": {"A": "b"},
        "Tags": [{"Key": "archipelago-key", "Value": "run-0-1"}],
    }


def test_a_spot_job_can_wait_longer_than_its_deadline() -> None:
    made = request(dataclasses.replace(SPEC, spot=True))
    assert made["EnableManagedSpotTraining"] is True
    assert made["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 3600,
        "MaxWaitTimeInSeconds": 7200,
    }


def test_network_and_keys_are_passed_on() -> None:
    options = dataclasses.replace(
        OPTIONS,
        subnets=("subnet-1", "subnet-2"),
        security_group_ids=("sg-1",),
        kms_key_id="alias/out",
        volume_kms_key_id="alias/disk",
        volume_size_gib=200,
    )
    made = request(options=options)
    assert made["VpcConfig"] == {
        "Subnets": ["subnet-1", "subnet-2"],
        "SecurityGroupIds": ["sg-1"],
    }
    assert made["OutputDataConfig"]["KmsKeyId"] == "alias/out"
    assert made["ResourceConfig"]["VolumeKmsKeyId"] == "alias/disk"
    assert made["ResourceConfig"]["VolumeSizeInGB"] == 200


def test_without_a_deadline_a_job_gets_the_longest_runtime() -> None:
    made = request(dataclasses.replace(SPEC, timeout_s=None))
    assert made["StoppingCondition"] == {"MaxRuntimeInSeconds": 432_000}


def test_missing_options_are_named() -> None:
    with pytest.raises(LaunchRefused, match="expected role_arn, image, output_path, found none"):
        request(options=Options(), output="")


def test_the_default_output_path_is_in_the_rendezvous() -> None:
    code = CodeRef(uri="s3://bucket/run/", sha256="0" * 64)
    assert output_path(OPTIONS, code) == "s3://bucket/run/sagemaker"
    assert output_path(OPTIONS, dataclasses.replace(code, uri="gs://bucket/run")) == ""
    own = dataclasses.replace(OPTIONS, output_path="s3://other/place")
    assert output_path(own, code) == "s3://other/place"


def test_a_long_command_is_split_and_a_longer_one_refused() -> None:
    entrypoint, arguments = split_command(["python", *map(str, range(150))])
    assert (len(entrypoint), len(arguments)) == (51, 100)
    assert [*entrypoint, *arguments] == ["python", *map(str, range(150))]
    for command in (["python"], ["python", *"x" * 200], ["python", "x" * 257]):
        with pytest.raises(LaunchRefused, match="expected 2 to 200 parts"):
            split_command(command)


def test_options_are_read_from_forms_and_files() -> None:
    given = {"subnets": "subnet-1, subnet-2", "regions": ["eu-west-1"], "volume_size_gib": "80"}
    options = read(Options, given)
    assert options.subnets == ("subnet-1", "subnet-2")
    assert options.regions == ("eu-west-1",)
    assert options.volume_size_gib == 80
    own = options_of(options, dataclasses.replace(SPEC, options={"image": "other"}))
    assert (own.image, own.subnets) == ("other", options.subnets)
    with pytest.raises(LaunchRefused, match="regions: expected in the executor's options"):
        options_of(options, dataclasses.replace(SPEC, options={"regions": "us-east-1"}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rolearn": "x"}, "options: expected role_arn, .* found rolearn"),
        ({"volume_size_gib": "big"}, "volume_size_gib: expected a whole number"),
        ({"volume_size_gib": True}, "volume_size_gib: expected a whole number"),
        ({"poll_s": 0}, "poll_s: expected a number above 0"),
        ({"subnets": 3}, "subnets: expected a list of texts, found 3"),
        ({"image": None}, "image: expected a text, found None"),
    ],
)
def test_a_wrong_option_names_the_expected_value(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(Options, given)


@pytest.mark.parametrize(
    "image",
    [
        "763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:2.8.0-gpu-py312-sagemaker",
        "123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn/team/replica@sha256:" + "a" * 64,
        "123456789012.dkr.ecr.us-east-1.amazonaws.com/replica",
    ],
)
def test_images_in_ecr_are_accepted(image: str) -> None:
    assert IMAGE.fullmatch(image)


@pytest.mark.parametrize(
    "image", ["python:3.12", "ghcr.io/a/b:1", "123.dkr.ecr.us-east-1.amazonaws.com/a"]
)
def test_images_elsewhere_are_refused(image: str) -> None:
    assert not IMAGE.fullmatch(image)


def test_the_step_reads_from_the_region_of_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    arn = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:archipelago/a--run-0-1-abcdef"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # of a bucket outside AWS
    monkeypatch.setenv("AWS_DEFAULT_REGION", "auto")
    monkeypatch.delenv("AWS_ENDPOINT_URL_SECRETS_MANAGER", raising=False)
    result = sagemaker_step.client(arn).meta.endpoint_url
    assert result == "https://secretsmanager.eu-west-1.amazonaws.com"


def test_positions_round_trip() -> None:
    position = Position(stream="a--run-0-1/algo-1-1700000000", at_ms=1700000000123, count=4)
    assert Position.read(str(position)) == position
    assert Position.read("") == Position()
    for text in ("x", "x:1", "x:y:1", ":1:2"):
        with pytest.raises(ValueError, match="position of a line"):
            Position.read(text)


def test_the_catalogue_lists_existing_instance_types() -> None:
    names = {choice.name for choice in Catalogue((hardware.TABLE,)).of("sagemaker")}
    assert names <= set(Clients({}, answer_s=1).instance_types())
    assert hardware.TABLE.read_on and hardware.TABLE.source
