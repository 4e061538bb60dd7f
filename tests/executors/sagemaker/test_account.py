"""The AWS identity, regions and the preflight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executors.base import (
    AccountError,
    ExecutorConfig,
    JobState,
    LaunchRefused,
    ReplicaSpec,
    RetryLater,
)
from executors.registry import get_executor
from executors.sagemaker.executor import SageMakerExecutor
from tests.emulators.sagemaker import ACCESS_KEY, ROLE, SECRET_KEY
from tests.executors.harnesses import launch, number_in
from tests.executors.sagemaker.harness import OPTIONS, REGION, SageMakerHarness

pytestmark = pytest.mark.processes


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[SageMakerHarness]:
    with SageMakerHarness(tmp_path / "world") as opened:
        yield opened


def test_the_environment_leads_to_account_and_endpoints(
    harness: SageMakerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SAGEMAKER", "CLOUDWATCH_LOGS", "STS", "SECRETS_MANAGER", "SERVICE_QUOTAS"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{name}", harness.server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    executor = get_executor("sagemaker", ExecutorConfig(options=OPTIONS))
    text = executor.check()
    assert "AWS account 123456789012" in text and "user/control" in text and "eu-west-1" in text
    assert executor.capabilities.regions == ("eu-west-1",)


def test_a_credential_can_set_an_endpoint_per_service(harness: SageMakerHarness) -> None:
    credentials = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ENDPOINT_URL_SAGEMAKER": harness.server.url,
        "AWS_ENDPOINT_URL_STS": harness.server.url,
    }
    executor = harness.executor(credentials=credentials)
    executor.check()
    with pytest.raises(RetryLater, match="Could not connect to the endpoint"):
        launch(executor, "exit", 0, secrets={"TOKEN": "s3cr3t-1"})


def test_missing_credentials_or_region_require_intervention(
    harness: SageMakerHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    given = {"AWS_ENDPOINT_URL": harness.server.url}
    without_region = SageMakerExecutor(ExecutorConfig(credentials=given))
    with pytest.raises(AccountError, match="expected a region"):
        without_region.check()
    (problem,) = without_region.preflight(ReplicaSpec(launch_key="a", replica=0), 1)
    assert problem.field == "credential"
    anonymous = SageMakerExecutor(ExecutorConfig(credentials={**given, "AWS_REGION": REGION}))
    with pytest.raises(AccountError, match="Unable to locate credentials"):
        anonymous.check()


def test_a_wrong_secret_key_is_refused(harness: SageMakerHarness) -> None:
    executor = harness.executor(credentials={"AWS_SECRET_ACCESS_KEY": "another-key"})
    for call in (executor.check, executor.live):
        with pytest.raises(AccountError, match="signature we calculated does not match"):
            call()


def test_jobs_are_found_in_every_region_that_is_named(
    harness: SageMakerHarness, tmp_path: Path
) -> None:
    executor = harness.executor(regions=["us-east-1", "eu-west-1"])
    here = launch(executor, "wait", tmp_path / "here", key="run-0-1")
    there = launch(executor, "wait", tmp_path / "there", key="run-1-1", region="eu-west-1")
    assert (here.data["region"], there.data["region"]) == ("us-east-1", "eu-west-1")
    assert executor.find("run-1-1") == there
    assert executor.live() == [here, there]
    assert harness.executor().find("run-1-1") is None
    number_in(tmp_path / "there")
    assert {status.state for status in executor.poll([there, here])} == {JobState.RUNNING}
    with pytest.raises(LaunchRefused, match="expected one of us-east-1, eu-west-1"):
        launch(executor, "exit", 0, key="run-2-1", region="eu-north-1")
    executor.cancel([here, there])
    executor.collect([here, there], 60)


def test_unknown_options_require_intervention(harness: SageMakerHarness) -> None:
    with pytest.raises(AccountError, match="found role"):
        harness.executor(role="arn:aws:iam::123456789012:role/x")


@pytest.mark.parametrize(
    ("options", "spec", "field", "words"),
    [
        ({"role_arn": "admin"}, {}, "options", "role_arn: expected arn:aws:iam::"),
        ({"role_arn": ROLE.replace("1234", "9999")}, {}, "options", "a role of account 1234"),
        ({}, {"image": "python:3.12"}, "image", "expected an image in ECR"),
        (
            {},
            {"image": OPTIONS["image"].replace("us-east-1", "eu-west-1")},
            "image",
            "in the registry of us-east-1",
        ),
        ({"output_path": "/tmp/x"}, {}, "options", "output_path: expected s3://"),
        ({"subnets": "subnet-1"}, {}, "options", "subnets and security_group_ids"),
        ({}, {"options": {"colour": "red"}}, "options", "found colour"),
    ],
)
def test_preflight_names_the_problem(
    harness: SageMakerHarness, options: dict[str, Any], spec: dict[str, Any], field: str, words: str
) -> None:
    executor = harness.executor(**options)
    made = ReplicaSpec(launch_key="run-0-1", replica=0, **spec)
    (problem,) = executor.preflight(made, 1)
    assert problem.field == field
    assert words in problem.message


def test_preflight_reads_the_quota(harness: SageMakerHarness) -> None:
    executor = harness.executor()
    harness.server.quotas.limits["ml.g5.xlarge for spot training job usage"] = 1
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, hardware="ml.g5.xlarge", spot=True)
    assert executor.preflight(spec, 1) == []
    (problem,) = executor.preflight(spec, 3)
    assert problem.field == "hardware"
    assert "'ml.g5.xlarge for spot training job usage' of us-east-1 is 1, expected 3" in (
        problem.message
    )
    harness.server.denied.add("service-quotas:ListServiceQuotas")
    assert executor.preflight(spec, 3) == []


def test_preflight_names_the_missing_permission(harness: SageMakerHarness) -> None:
    harness.server.denied.add("sagemaker:ListTrainingJobs")
    (problem,) = harness.executor().preflight(ReplicaSpec(launch_key="a", replica=0), 1)
    assert problem.field == "credential"
    assert "not authorized to perform: sagemaker:ListTrainingJobs" in problem.message
