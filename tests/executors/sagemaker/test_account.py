"""Who we are to AWS, where, and what a launch would fail of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executors.base import (
    ExecutorConfig,
    JobState,
    LaunchRefused,
    NeedsPerson,
    ReplicaSpec,
    RetryLater,
)
from executors.registry import get_executor
from executors.sagemaker.executor import SageMakerExecutor
from tests.emulators.sagemaker import ACCESS_KEY, ROLE, SECRET_KEY
from tests.executors.sagemaker.world import OPTIONS, REGION, SageMakerWorld
from tests.executors.worlds import launch, number_in

pytestmark = pytest.mark.processes


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SageMakerWorld]:
    with SageMakerWorld(tmp_path / "world") as opened:
        yield opened


def test_the_environment_leads_to_account_and_endpoints(
    world: SageMakerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SAGEMAKER", "CLOUDWATCH_LOGS", "STS", "SECRETS_MANAGER", "SERVICE_QUOTAS"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{name}", world.server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    executor = get_executor("sagemaker", ExecutorConfig(options=OPTIONS))
    said = executor.check()
    assert "AWS account 123456789012" in said and "user/control" in said and "eu-west-1" in said
    assert executor.capabilities.regions == ("eu-west-1",)


def test_a_credential_may_name_an_endpoint_of_each_service(world: SageMakerWorld) -> None:
    credentials = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ENDPOINT_URL_SAGEMAKER": world.server.url,
        "AWS_ENDPOINT_URL_STS": world.server.url,
    }
    executor = world.executor(credentials=credentials)
    executor.check()
    with pytest.raises(RetryLater, match="Could not connect to the endpoint"):
        launch(executor, "exit", 0, secrets={"TOKEN": "s3cr3t-1"})


def test_without_credentials_or_region_a_person_is_needed(
    world: SageMakerWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    given = {"AWS_ENDPOINT_URL": world.server.url}
    nowhere = SageMakerExecutor(ExecutorConfig(credentials=given))
    with pytest.raises(NeedsPerson, match="expected a region"):
        nowhere.check()
    (problem,) = nowhere.preflight(ReplicaSpec(launch_key="a", replica=0), 1)
    assert problem.field == "credential"
    nobody = SageMakerExecutor(ExecutorConfig(credentials={**given, "AWS_REGION": REGION}))
    with pytest.raises(NeedsPerson, match="Unable to locate credentials"):
        nobody.check()


def test_a_wrong_secret_key_is_refused(world: SageMakerWorld) -> None:
    executor = world.executor(credentials={"AWS_SECRET_ACCESS_KEY": "another-key"})
    for call in (executor.check, executor.live):
        with pytest.raises(NeedsPerson, match="signature we calculated does not match"):
            call()


def test_jobs_are_found_in_every_region_that_is_named(
    world: SageMakerWorld, tmp_path: Path
) -> None:
    executor = world.executor(regions=["us-east-1", "eu-west-1"])
    here = launch(executor, "wait", tmp_path / "here", key="run-0-1")
    there = launch(executor, "wait", tmp_path / "there", key="run-1-1", region="eu-west-1")
    assert (here.data["region"], there.data["region"]) == ("us-east-1", "eu-west-1")
    assert executor.find("run-1-1") == there
    assert executor.live() == [here, there]
    assert world.executor().find("run-1-1") is None
    number_in(tmp_path / "there")
    assert {status.state for status in executor.poll([there, here])} == {JobState.RUNNING}
    with pytest.raises(LaunchRefused, match="expected one of us-east-1, eu-west-1"):
        launch(executor, "exit", 0, key="run-2-1", region="eu-north-1")
    executor.cancel([here, there])
    executor.collect([here, there], 60)


def test_options_nobody_knows_need_a_person(world: SageMakerWorld) -> None:
    with pytest.raises(NeedsPerson, match="found 'role'"):
        world.executor(role="arn:aws:iam::123456789012:role/x")


@pytest.mark.parametrize(
    ("options", "spec", "field", "words"),
    [
        ({"role_arn": "admin"}, {}, "options", "role_arn: expected arn:aws:iam::"),
        ({"role_arn": ROLE.replace("1234", "9999")}, {}, "options", "a role of account 1234"),
        ({}, {"image": "python:3.12"}, "image", "expected an image in ECR"),
        ({}, {"image": OPTIONS["image"].replace("us-east-1", "eu-west-1")}, "image",
         "in the registry of us-east-1"),
        ({"output_path": "/tmp/x"}, {}, "options", "output_path: expected s3://"),
        ({"subnets": "subnet-1"}, {}, "options", "subnets and security_group_ids"),
        ({}, {"options": {"colour": "red"}}, "options", "found 'colour'"),
    ],
)  # fmt: skip
def test_preflight_names_what_is_wrong(
    world: SageMakerWorld, options: dict[str, Any], spec: dict[str, Any], field: str, words: str
) -> None:
    executor = world.executor(**options)
    made = ReplicaSpec(launch_key="run-0-1", replica=0, **spec)
    (problem,) = executor.preflight(made, 1)
    assert problem.field == field
    assert words in problem.message


def test_preflight_reads_the_quota(world: SageMakerWorld) -> None:
    executor = world.executor()
    world.server.quotas.limits["ml.g5.xlarge for spot training job usage"] = 1
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, hardware="ml.g5.xlarge", spot=True)
    assert executor.preflight(spec, 1) == []
    (problem,) = executor.preflight(spec, 3)
    assert problem.field == "hardware"
    assert "'ml.g5.xlarge for spot training job usage' of us-east-1 is 1, expected 3" in (
        problem.message
    )
    world.server.denied.add("service-quotas:ListServiceQuotas")
    assert executor.preflight(spec, 3) == []


def test_preflight_says_what_the_credential_may_not(world: SageMakerWorld) -> None:
    world.server.denied.add("sagemaker:ListTrainingJobs")
    (problem,) = world.executor().preflight(ReplicaSpec(launch_key="a", replica=0), 1)
    assert problem.field == "credential"
    assert "not authorized to perform: sagemaker:ListTrainingJobs" in problem.message
