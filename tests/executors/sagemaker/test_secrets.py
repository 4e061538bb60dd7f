"""Secrets of SageMaker jobs: in Secrets Manager during the job's life, and nowhere else."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from executors.base import (
    AccountError,
    Cause,
    CodeRef,
    LaunchRefused,
    ReplicaHandle,
    RetryLater,
)
from executors.sagemaker.secrets import FOLDER, delete, put
from tests.emulators.faults import Fault
from tests.executors.bundles import PROGRAM, zipped
from tests.executors.harnesses import end_of, launch, number_in, text_of
from tests.executors.sagemaker.harness import REGION, SageMakerHarness
from tests.servers import S3Server

pytestmark = pytest.mark.processes

SECRET = "archipelago/contract--run-0-1"


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[SageMakerHarness]:
    with SageMakerHarness(tmp_path / "world") as opened:
        yield opened


def described(harness: SageMakerHarness, handle: ReplicaHandle) -> dict[str, Any]:
    return harness.server.jobs.describe(REGION, {"TrainingJobName": handle.data["name"]})


def test_a_secret_is_kept_while_its_job_lives(harness: SageMakerHarness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up", secrets={"TOKEN": "s3cr3t-1"})
    number_in(tmp_path / "up")
    executor.poll([handle])
    (kept,) = harness.server.secrets.kept.values()
    assert kept["Name"] == SECRET
    assert json.loads(kept["SecretString"]) == {"TOKEN": "s3cr3t-1"}
    assert {"Key": "archipelago-deployment", "Value": "contract"} in kept["Tags"]
    assert described(harness, handle)["Environment"]["ARCHIPELAGO_SECRET_ARN"] == kept["ARN"]
    executor.cancel([handle])
    end_of(executor, handle)
    assert harness.server.secrets.kept == {}


def test_without_secrets_secrets_manager_is_not_used(harness: SageMakerHarness) -> None:
    executor = harness.executor()
    handle = launch(executor, "env")
    assert end_of(executor, handle).cause is Cause.DONE
    assert not [call for call in harness.server.seen if call.startswith("secretsmanager")]
    env = json.loads("".join(text_of(executor, handle)))
    assert "ARCHIPELAGO_SECRET_ARN" not in env
    assert env["AWS_DEFAULT_REGION"] == REGION


def test_the_step_restores_the_environment(harness: SageMakerHarness) -> None:
    executor = harness.executor()
    # A bucket outside AWS has its own endpoint and keys, which must not be used for the secret.
    bucket = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_REGION": "auto"}
    handle = launch(executor, "env", env=bucket, secrets={"AWS_ACCESS_KEY_ID": "bucket-key"})
    assert end_of(executor, handle).cause is Cause.DONE, text_of(executor, handle)
    env = json.loads("".join(text_of(executor, handle)))
    assert env["AWS_ACCESS_KEY_ID"] == "bucket-key"
    assert (env["AWS_REGION"], env["AWS_ENDPOINT_URL"]) == ("auto", bucket["AWS_ENDPOINT_URL"])
    assert "ARCHIPELAGO_SECRET_ARN" not in env and "AWS_DEFAULT_REGION" not in env


def test_a_refused_launch_leaves_no_secret(harness: SageMakerHarness) -> None:
    executor = harness.executor()
    harness.refuse_quota("the limit is 0 Instances")
    with pytest.raises(AccountError, match="the limit is 0 Instances"):
        launch(executor, "exit", 0, secrets={"TOKEN": "s3cr3t-1"})
    assert harness.server.secrets.kept == {}


def test_launched_again_after_the_end_it_leaves_no_secret(harness: SageMakerHarness) -> None:
    executor = harness.executor()
    first = launch(executor, "exit", 0, secrets={"TOKEN": "s3cr3t-1"})
    end_of(executor, first)
    assert launch(executor, "exit", 0, secrets={"TOKEN": "s3cr3t-2"}) == first
    assert harness.server.secrets.kept == {}


def test_a_launch_waits_for_the_deletion_of_a_name(
    harness: SageMakerHarness, tmp_path: Path
) -> None:
    """A deletion is asynchronous and blocks the name until it completes."""
    executor = harness.executor()
    client = executor._clients.get("secretsmanager", REGION)
    name = SECRET.removeprefix(FOLDER)
    put(client, name, {"TOKEN": "t"}, tags={})
    harness.server.hold_deletions()
    delete(client, name)
    with pytest.raises(RetryLater, match="scheduled for deletion"):
        launch(executor, "exit", 0, secrets={"TOKEN": "t"})
    harness.server.hold_deletions(False)
    assert end_of(executor, launch(executor, "exit", 0, secrets={"TOKEN": "t"})).cause is Cause.DONE


@pytest.mark.parametrize("held", [False, True])
def test_a_secret_that_is_deleted_between_two_requests_is_stored_later(
    harness: SageMakerHarness, tmp_path: Path, held: bool
) -> None:
    executor = harness.executor()
    launch(executor, "wait", tmp_path / "up", secrets={"TOKEN": "t"})
    kept = harness.server.secrets
    kept.hold_deletions(held)

    def rule(operation: str) -> Fault:
        if operation == "PutSecretValue":
            kept.delete(REGION, {"SecretId": SECRET, "ForceDeleteWithoutRecovery": True})
        return ""

    harness.server.faults.rule = rule
    with pytest.raises(RetryLater):
        launch(executor, "wait", tmp_path / "up", secrets={"TOKEN": "t"})


def test_a_repeated_launch_stores_the_newer_secret(
    harness: SageMakerHarness, tmp_path: Path
) -> None:
    executor = harness.executor()
    harness.server.withhold_machines()
    first = launch(executor, "digests", "TOKEN", secrets={"TOKEN": "old"})
    assert launch(executor, "digests", "TOKEN", secrets={"TOKEN": "new"}) == first
    (kept,) = harness.server.secrets.kept.values()
    assert json.loads(kept["SecretString"]) == {"TOKEN": "new"}


def test_a_role_without_access_to_secrets_is_named(harness: SageMakerHarness) -> None:
    harness.server.denied.add("secretsmanager:GetSecretValue")
    executor = harness.executor()
    handle = launch(executor, "exit", 0, secrets={"TOKEN": "s3cr3t-1"})
    assert end_of(executor, handle).cause is Cause.ERROR
    message = "\n".join(text_of(executor, handle))
    assert "the replica's secrets could not be fetched" in message
    assert "not authorized to perform: secretsmanager:GetSecretValue" in message


def test_too_much_secret_is_refused_by_name(harness: SageMakerHarness) -> None:
    with pytest.raises(LaunchRefused, match=r"at most 65536 bytes.*\(TOKEN\)") as caught:
        launch(harness.executor(), "exit", 0, secrets={"TOKEN": "x" * 70_000})
    assert "xxx" not in str(caught.value)


def test_stale_secrets_are_deleted(harness: SageMakerHarness, tmp_path: Path) -> None:
    executor = harness.executor()
    living = launch(executor, "wait", tmp_path / "up", secrets={"TOKEN": "s3cr3t-1"})
    kept = harness.server.secrets
    for name in ("contract--run-9-9", "contract--run-8-1", "another--run-9-9"):
        kept.create(REGION, {"Name": f"archipelago/{name}", "SecretString": "{}"})
    for name in ("contract--run-9-9", "contract--run-0-1", "another--run-9-9"):
        kept.kept[REGION, f"archipelago/{name}"]["CreatedDate"] -= 7200
    assert executor.live() == [living]
    # Only the stale secret is deleted: not a live job's, a young one or another deployment's.
    assert sorted(name for _, name in kept.kept) == [
        "archipelago/another--run-9-9",
        "archipelago/contract--run-0-1",
        "archipelago/contract--run-8-1",
    ]
    harness.server.denied.add("secretsmanager:ListSecrets")
    assert executor.live() == [living]


def test_keys_of_another_bucket_provider_work(harness: SageMakerHarness, s3: S3Server) -> None:
    """The step reads the secret from AWS although the environment has another endpoint for
    buckets."""
    data = zipped({"bundled.py": PROGRAM})
    digest = hashlib.sha256(data).hexdigest()
    uri = f"s3://{s3.bucket}/sagemaker-secrets"
    client = boto3.client(
        "s3",
        endpoint_url=s3.endpoint_url,
        aws_access_key_id=s3.access_key,
        aws_secret_access_key=s3.secret_key,
        region_name="us-east-1",
    )
    client.put_object(Bucket=s3.bucket, Key=f"sagemaker-secrets/code/{digest}.zip", Body=data)
    executor = harness.executor(python=sys.executable)
    (handle,) = executor.launch_replicas(
        1, "bundled", {"args": ["a"]}, secrets=s3.env, code=CodeRef(uri=uri, sha256=digest)
    )
    status = end_of(executor, handle)
    message = text_of(executor, handle)
    assert status.cause is Cause.DONE, message
    assert 'ran [["a"], "0"]' in message
    assert s3.secret_key not in harness.description(handle)
