"""Refusals of the emulated SageMaker, with its messages and the real SDK."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError

from tests.emulators.sagemaker import ACCESS_KEY, ACCOUNT, ROLE, SECRET_KEY, SageMakerServer

pytestmark = pytest.mark.processes

ONCE = Config(retries={"total_max_attempts": 1})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SageMakerServer]:
    with SageMakerServer(tmp_path, grace_s=0.5) as opened:
        yield opened


def client(server: SageMakerServer, service: str = "sagemaker", **keys: str) -> Any:
    return boto3.Session(
        aws_access_key_id=keys.get("key", ACCESS_KEY),
        aws_secret_access_key=keys.get("secret", SECRET_KEY),
        aws_session_token=keys.get("token"),
        region_name="us-east-1",
    ).client(service, endpoint_url=server.url, config=ONCE)


def job(name: str = "run-0-1", **changed: Any) -> dict[str, Any]:
    return {
        "TrainingJobName": name,
        "AlgorithmSpecification": {
            "TrainingImage": "image",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["python", "-c", "print('here')"],
        },
        "RoleArn": ROLE,
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
        "ResourceConfig": {
            "InstanceType": "ml.m5.large",
            "InstanceCount": 1,
            "VolumeSizeInGB": 10,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
        **changed,
    }


def spot(wait_s: int) -> dict[str, Any]:
    stopping = {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": wait_s}
    return {"EnableManagedSpotTraining": True, "StoppingCondition": stopping}


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"TrainingJobName": "run_0"}, "ValidationException", "regular expression pattern"),
        ({"RoleArn": "admin-of-everything-here"}, "ValidationException", "'roleArn'"),
        (
            {"RoleArn": ROLE.replace(ACCOUNT, "999999999999")},
            "ValidationException",
            "Could not assume role",
        ),
        (
            {
                "ResourceConfig": {
                    "InstanceType": "ml.huge",
                    "InstanceCount": 1,
                    "VolumeSizeInGB": 1,
                }
            },
            "ValidationException",
            "'ml.huge' at 'resourceConfig.instanceType'",
        ),
        ({"Environment": {"LONG": "x" * 513}}, "ValidationException", "less than or equal to 512"),
        ({"Environment": {"not ok": "x"}}, "ValidationException", "regular expression pattern"),
        ({"Tags": [{"Key": "a", "Value": "x;y"}]}, "ValidationException", "'tags.1.member.value'"),
        (spot(59), "ValidationException", "Invalid MaxWaitTimeInSeconds"),
        (
            {"StoppingCondition": spot(99)["StoppingCondition"]},
            "ValidationException",
            "only supported with EnableManagedSpotTraining",
        ),
        (
            {"StoppingCondition": {"MaxRuntimeInSeconds": 500_000}},
            "ResourceLimitExceeded",
            "Longest run time for a training job",
        ),
    ],
)
def test_bad_jobs_are_refused(
    server: SageMakerServer, changed: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(ClientError) as caught:
        client(server).create_training_job(**job(**changed))
    error = caught.value.response["Error"]
    assert error["Code"] == code
    assert words in error["Message"]
    assert client(server).list_training_jobs()["TrainingJobSummaries"] == []


def test_arguments_have_limits(server: SageMakerServer) -> None:
    for entrypoint in (["x" * 257], ["a\nb"], ["x"] * 101):
        algorithm = {**job()["AlgorithmSpecification"], "ContainerEntrypoint": entrypoint}
        with pytest.raises(ClientError, match="containerEntrypoint"):
            client(server).create_training_job(**job(AlgorithmSpecification=algorithm))


def test_unknown_credentials_are_refused(server: SageMakerServer) -> None:
    request = urllib.request.Request(server.url, b"{}", {"X-Amz-Target": "SageMaker.ListTags"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 400 and b"MissingAuthenticationToken" in caught.value.read()
    for keys, code in (
        ({"key": "AKIAUNKNOWN"}, "UnrecognizedClientException"),
        ({"secret": "another"}, "InvalidSignatureException"),
        ({"token": "unknown"}, "UnrecognizedClientException"),
    ):
        with pytest.raises(ClientError, match=code):
            client(server, **keys).list_training_jobs()
        with pytest.raises(ClientError, match=r"InvalidClientTokenId|SignatureDoesNotMatch"):
            client(server, "sts", **keys).get_caller_identity()


def test_the_execution_role_can_only_read_its_secret(server: SageMakerServer) -> None:
    role = server._role("run-0-1")
    keys = {"key": role["AccessKeyId"], "secret": role["SecretAccessKey"], "token": role["Token"]}
    client(server, "secretsmanager").create_secret(Name="archipelago/a", SecretString="{}")
    secret = client(server, "secretsmanager", **keys).get_secret_value(SecretId="archipelago/a")
    assert secret["SecretString"] == "{}"
    for call in (
        lambda: client(server, **keys).list_training_jobs(),
        lambda: client(server, "secretsmanager", **keys).delete_secret(
            SecretId="archipelago/a", ForceDeleteWithoutRecovery=True
        ),
        lambda: client(server, "secretsmanager").get_secret_value(SecretId="archipelago/a"),
    ):
        with pytest.raises(ClientError, match="AccessDeniedException"):
            call()


def test_unsupported_operations_are_errors(server: SageMakerServer) -> None:
    with pytest.raises(ClientError, match="UnknownOperationException"):
        client(server).list_endpoints()


def test_a_spot_job_waits_no_longer_than_its_limit(server: SageMakerServer) -> None:
    server.withhold_machines()
    client(server).create_training_job(**job(**spot(60)))
    server.hold_stopping()
    server.jobs.named("run-0-1").created_s -= 61
    described = client(server).describe_training_job(TrainingJobName="run-0-1")
    assert (described["TrainingJobStatus"], described["SecondaryStatus"]) == ("Stopping",) * 2
    server.hold_stopping(False)
    server.jobs.stopping_s = 0.0
    described = client(server).describe_training_job(TrainingJobName="run-0-1")
    assert described["TrainingJobStatus"] == "Stopped"
    assert described["SecondaryStatus"] == "MaxWaitTimeExceeded"
    with pytest.raises(ClientError, match="training job is in status Stopped"):
        client(server).stop_training_job(TrainingJobName="run-0-1")


def test_jobs_outlive_a_pause_of_the_server(server: SageMakerServer) -> None:
    used = client(server)
    used.create_training_job(**job())
    server.stop()
    with pytest.raises(Exception, match=r"Could not connect|Connection was closed"):
        used.list_training_jobs()
    server.start()
    (result,) = used.list_training_jobs()["TrainingJobSummaries"]
    assert result["TrainingJobName"] == "run-0-1"
    with pytest.raises(ClientError, match=r"ResourceInUse.*already exists"):
        used.create_training_job(**job())


def test_the_quota_counts_jobs_until_they_are_stopped(server: SageMakerServer) -> None:
    used, quota = client(server), "ml.m5.large for training job usage"
    server.withhold_machines()
    server.limit(quota, 2)
    server.jobs.stopping_s = 0.0
    for name in ("a", "b"):
        used.create_training_job(**job(name))
    used.create_training_job(**job("c", **spot(60)))  # spot has a separate quota
    with pytest.raises(ClientError) as caught:
        used.create_training_job(**job("d"))
    error = caught.value.response["Error"]
    assert error["Code"] == "ResourceLimitExceeded"
    assert f"'{quota}' is 2 Instances, with current utilization of 2 Instances" in error["Message"]
    with pytest.raises(ClientError, match="ResourceLimitExceeded"):
        used.create_training_job(**job("a"))  # also of a name that is in use
    server.hold_stopping()
    used.stop_training_job(TrainingJobName="a")
    with pytest.raises(ClientError, match="training job is in status Stopping"):
        used.stop_training_job(TrainingJobName="a")
    with pytest.raises(ClientError, match="ResourceLimitExceeded"):
        used.create_training_job(**job("d"))
    server.hold_stopping(False)
    used.create_training_job(**job("d"))
    used.describe_training_job(TrainingJobName="d")
    server.limit(quota, 9)
    with pytest.raises(ClientError, match="ResourceInUse"):
        used.create_training_job(**job("a"))  # for ever


def test_lists_are_paged_and_can_lag(server: SageMakerServer) -> None:
    server.withhold_machines()
    used = client(server)
    for n in range(5):
        used.create_training_job(**job(f"run-{n}"))
    first = used.list_training_jobs(MaxResults=2, StatusEquals="InProgress")
    assert [j["TrainingJobName"] for j in first["TrainingJobSummaries"]] == ["run-4", "run-3"]
    with pytest.raises(ClientError, match="Invalid NextToken"):
        used.list_training_jobs(MaxResults=2, NextToken=first["NextToken"])
    with pytest.raises(ClientError, match="less than or equal to 100"):
        used.list_training_jobs(MaxResults=101)
    server.hold_lists()
    used.create_training_job(**job("run-5"))
    assert len(used.list_training_jobs()["TrainingJobSummaries"]) == 5
    assert used.describe_training_job(TrainingJobName="run-5")
    server.hold_lists(False)
    assert len(used.list_training_jobs()["TrainingJobSummaries"]) == 6


def test_a_request_or_its_response_can_be_lost(server: SageMakerServer) -> None:
    server.withhold_machines()
    used = client(server)
    for fault, made in (("unavailable", 0), ("drop_before", 0), ("drop_after", 1)):
        server.faults.rule = lambda name, fault=fault: fault if name == "CreateTrainingJob" else ""
        with pytest.raises((ClientError, ConnectionClosedError)):
            used.create_training_job(**job("run"))
        assert len(used.list_training_jobs()["TrainingJobSummaries"]) == made


def test_limits_of_the_model_are_the_services(server: SageMakerServer) -> None:
    for changed, words in (
        ({"Environment": {f"V{n}": "x" for n in range(101)}}, "'environment'"),
        ({"HyperParameters": {f"h{n}": "x" for n in range(101)}}, "'hyperParameters'"),
        ({"HyperParameters": {"h": "x" * 2501}}, "'hyperParameters.h.member'"),
        ({"TrainingJobName": "x" * 64}, "'trainingJobName'"),
    ):
        with pytest.raises(ClientError, match="ValidationException") as caught:
            client(server).create_training_job(**job(**changed))
        assert words in caught.value.response["Error"]["Message"]
