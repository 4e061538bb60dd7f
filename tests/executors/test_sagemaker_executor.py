"""SageMaker's executor against the emulated account, beyond the suite of every executor: secrets,
spot, regions, quotas, and how it is told who it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emulators.sagemaker import ACCESS_KEY, ROLE, SECRET_KEY
from executors.base import (
    Cause,
    ExecutorConfig,
    JobState,
    LaunchRefused,
    NeedsPerson,
    ReplicaHandle,
    ReplicaSpec,
    RetryLater,
)
from executors.registry import get_executor
from executors.sagemaker import SageMakerExecutor
from tests.executors.bundles import code_in
from tests.executors.sagemaker_world import OPTIONS, REGION, SageMakerWorld
from tests.executors.worlds import end_of, launch, number_in, stub_env, text_of

pytestmark = pytest.mark.processes

SECRET = "archipelago/contract--run-0-1"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SageMakerWorld]:
    with SageMakerWorld(tmp_path / "world") as opened:
        yield opened


def described(world: SageMakerWorld, handle: ReplicaHandle) -> dict[str, Any]:
    return world.server.jobs.describe(REGION, {"TrainingJobName": handle.data["name"]})


def state_of(executor: SageMakerExecutor, handle: ReplicaHandle) -> tuple[JobState, Cause | None]:
    (status,) = executor.poll([handle])
    return status.state, status.cause


# Secrets


def test_a_secret_is_kept_while_its_job_lives(world: SageMakerWorld, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", secrets={"TOKEN": "s3cr3t-1"})
    number_in(tmp_path / "up")
    executor.poll([handle])
    (kept,) = world.server.secrets.kept.values()
    assert kept["Name"] == SECRET
    assert json.loads(kept["SecretString"]) == {"TOKEN": "s3cr3t-1"}
    assert {"Key": "archipelago-deployment", "Value": "contract"} in kept["Tags"]
    assert described(world, handle)["Environment"]["ARCHIPELAGO_SECRET_ARN"] == kept["ARN"]
    executor.cancel([handle])
    end_of(executor, handle)
    assert world.server.secrets.kept == {}


def test_without_secrets_secrets_manager_is_not_asked(world: SageMakerWorld) -> None:
    executor = world.executor()
    handle = launch(executor, "env")
    assert end_of(executor, handle).cause is Cause.DONE
    assert not [call for call in world.server.seen if call.startswith("secretsmanager")]
    env = json.loads("".join(text_of(executor, handle)))
    assert "ARCHIPELAGO_SECRET_ARN" not in env
    assert env["AWS_DEFAULT_REGION"] == REGION


def test_the_step_leaves_nothing_of_itself(world: SageMakerWorld) -> None:
    executor = world.executor()
    # A bucket elsewhere has its own endpoint and keys: not those that lead to the secret.
    bucket = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_REGION": "auto"}
    handle = launch(executor, "env", env=bucket, secrets={"AWS_ACCESS_KEY_ID": "bucket-key"})
    assert end_of(executor, handle).cause is Cause.DONE, text_of(executor, handle)
    env = json.loads("".join(text_of(executor, handle)))
    assert env["AWS_ACCESS_KEY_ID"] == "bucket-key"
    assert (env["AWS_REGION"], env["AWS_ENDPOINT_URL"]) == ("auto", bucket["AWS_ENDPOINT_URL"])
    assert "ARCHIPELAGO_SECRET_ARN" not in env and "AWS_DEFAULT_REGION" not in env


def test_a_refused_launch_leaves_no_secret(world: SageMakerWorld) -> None:
    executor = world.executor()
    world.refuse_quota("the limit is 0 Instances")
    with pytest.raises(NeedsPerson, match="the limit is 0 Instances"):
        launch(executor, "exit", 0, secrets={"TOKEN": "s3cr3t-1"})
    assert world.server.secrets.kept == {}


def test_launched_again_after_the_end_it_leaves_no_secret(world: SageMakerWorld) -> None:
    executor = world.executor()
    first = launch(executor, "exit", 0, secrets={"TOKEN": "s3cr3t-1"})
    end_of(executor, first)
    assert launch(executor, "exit", 0, secrets={"TOKEN": "s3cr3t-2"}) == first
    assert world.server.secrets.kept == {}


def test_a_repeated_launch_brings_the_newer_secret(world: SageMakerWorld, tmp_path: Path) -> None:
    executor = world.executor()
    world.server.withhold_machines()
    first = launch(executor, "digests", "TOKEN", secrets={"TOKEN": "old"})
    assert launch(executor, "digests", "TOKEN", secrets={"TOKEN": "new"}) == first
    (kept,) = world.server.secrets.kept.values()
    assert json.loads(kept["SecretString"]) == {"TOKEN": "new"}


def test_a_role_that_may_not_read_secrets_is_named(world: SageMakerWorld) -> None:
    world.server.denied.add("secretsmanager:GetSecretValue")
    executor = world.executor()
    handle = launch(executor, "exit", 0, secrets={"TOKEN": "s3cr3t-1"})
    assert end_of(executor, handle).cause is Cause.ERROR
    said = "\n".join(text_of(executor, handle))
    assert "the replica's secrets could not be fetched" in said
    assert "not authorized to perform: secretsmanager:GetSecretValue" in said


def test_too_much_secret_is_refused_by_name(world: SageMakerWorld) -> None:
    with pytest.raises(LaunchRefused, match=r"at most 65536 bytes.*\(TOKEN\)") as caught:
        launch(world.executor(), "exit", 0, secrets={"TOKEN": "x" * 70_000})
    assert "xxx" not in str(caught.value)


def test_left_behind_secrets_are_swept(world: SageMakerWorld, tmp_path: Path) -> None:
    executor = world.executor()
    living = launch(executor, "wait", tmp_path / "up", secrets={"TOKEN": "s3cr3t-1"})
    kept = world.server.secrets
    for name in ("contract--run-9-9", "contract--run-8-1", "another--run-9-9"):
        kept.create(REGION, {"Name": f"archipelago/{name}", "SecretString": "{}"})
    for name in ("contract--run-9-9", "contract--run-0-1", "another--run-9-9"):
        kept.kept[REGION, f"archipelago/{name}"]["CreatedDate"] -= 7200
    assert executor.live() == [living]
    # The one without a job is gone; kept are a living job's, a young one, and another's.
    assert sorted(name for _, name in kept.kept) == [
        "archipelago/another--run-9-9",
        "archipelago/contract--run-0-1",
        "archipelago/contract--run-8-1",
    ]
    world.server.denied.add("secretsmanager:ListSecrets")
    assert executor.live() == [living]


# Spot


def test_an_interrupted_job_is_stopped_and_stays_stopped(
    world: SageMakerWorld, tmp_path: Path
) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", spot=True, secrets={"TOKEN": "s3cr3t-1"})
    number_in(tmp_path / "up")
    assert state_of(executor, handle) == (JobState.RUNNING, None)
    world.preempt(handle)
    status = end_of(executor, handle)
    assert (status.cause, status.message) == (Cause.PREEMPTED, "the spot instance was interrupted")
    assert world.server.secrets.kept == {}
    (tmp_path / "up").unlink()
    world.server.give_machines()
    assert described(world, handle)["TrainingJobStatus"] == "Stopped"
    for other in (executor, world.executor()):
        (again,) = other.poll([handle])
        assert (again.state, again.cause) == (JobState.ENDED, Cause.PREEMPTED)
    assert again.billed_s is not None
    assert executor.live() == []
    assert not (tmp_path / "up").exists()


def test_one_that_came_back_before_anybody_looked_runs_on(
    world: SageMakerWorld, tmp_path: Path
) -> None:
    executor = world.executor()
    handle = launch(executor, "lines", tmp_path / "go on", spot=True)
    lines = executor.logs(handle, follow=True)
    assert next(lines).text == "first"
    world.preempt(handle)
    while described(world, handle)["SecondaryStatus"] != "Interrupted":
        pass
    world.server.give_machines()
    assert state_of(world.executor(), handle) == (JobState.RUNNING, None)
    (tmp_path / "go on").touch()
    # Both starts' output, in order: CloudWatch has a stream for each.
    end = "no newline at the end"
    assert [line.text for line in lines] == ["first", "second", end]
    assert end_of(executor, handle).cause is Cause.DONE
    (first, *rest) = executor.logs(handle)
    assert list(world.executor().logs(handle, after=first.position)) == rest


def test_a_spot_job_is_billed_less_than_it_trained(world: SageMakerWorld, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0, spot=True)
    status = end_of(executor, handle)
    assert status.billed_s == described(world, handle)["BillableTimeInSeconds"]


# Machines


def test_a_job_without_a_machine_is_pending(world: SageMakerWorld, tmp_path: Path) -> None:
    world.server.withhold_machines()
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    (status,) = executor.poll([handle])
    assert (status.state, status.phase) == (JobState.PENDING, "Starting")
    assert status.message == "Launching requested ML instances"
    assert executor.live() == [handle]
    world.server.give_machines()
    number_in(tmp_path / "up")
    assert state_of(executor, handle) == (JobState.RUNNING, None)
    executor.cancel([handle])
    end_of(executor, handle)


def test_a_job_that_never_gets_a_machine_is_lost(world: SageMakerWorld) -> None:
    world.server.withhold_machines()
    executor = world.executor()
    handle = launch(executor, "exit", 0)
    world.server.starve(handle.launch_key)
    status = end_of(executor, handle)
    assert status.cause is Cause.LOST
    assert "CapacityError" in status.message


def test_a_machine_that_breaks_is_not_the_replicas_fault(
    world: SageMakerWorld, tmp_path: Path
) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    world.server.break_down(handle.data["name"])
    assert end_of(executor, handle).cause is Cause.LOST


def test_a_launch_that_is_throttled_goes_on(world: SageMakerWorld) -> None:
    executor = world.executor()
    executor.check()
    # More than the SDK retries by itself.
    executor._launcher._sleep = lambda _: None
    world.server.throttle(4)
    handle = launch(executor, "exit", 0)
    assert end_of(executor, handle).cause is Cause.DONE
    world.server.throttle(99)
    with pytest.raises(RetryLater, match="Rate exceeded"):
        executor.poll([handle])


def test_a_name_is_taken_only_once(world: SageMakerWorld) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0)
    end_of(executor, handle)
    world.lose(handle)
    assert executor.find("run-0-1") is None
    with pytest.raises(LaunchRefused, match="takes a name only once"):
        launch(executor, "exit", 0)


def test_a_cut_name_still_tells_its_key(world: SageMakerWorld, tmp_path: Path) -> None:
    key = "k" * 61 + "-1"
    executor = world.executor(deployment="a-long-deployment-name")
    handle = launch(executor, "wait", tmp_path / "up", key=key)
    assert executor.live() == [handle] and handle.launch_key == key
    executor.cancel([handle])
    end_of(executor, handle)


def test_many_jobs_are_listed_page_by_page(world: SageMakerWorld) -> None:
    world.server.withhold_machines()
    executor = world.executor()
    specs = [ReplicaSpec(launch_key=f"run-{n}-1", replica=n) for n in range(130)]
    handles = executor.launch_replicas(130, "replica_stub", specs=specs, env=stub_env())
    assert {handle.launch_key for handle in executor.live()} == {s.launch_key for s in specs}
    executor.poll(handles)
    before = world.requests()
    assert {status.state for status in executor.poll(handles)} == {JobState.PENDING}
    assert world.requests() - before == 2
    executor.cancel(handles)


def test_logs_come_in_pages(world: SageMakerWorld) -> None:
    world.server.jobs.log_page = 7
    executor = world.executor()
    said = [f"line {n}" for n in range(40)]
    handle = launch(executor, "exit", 0, *said)
    end_of(executor, handle)
    lines = list(executor.logs(handle))
    assert [line.text for line in lines] == said
    for stop in (1, 6, 7, 8, 39):
        assert list(executor.logs(handle, after=lines[stop - 1].position)) == lines[stop:]


def test_code_of_the_rendezvous_is_run(world: SageMakerWorld, tmp_path: Path) -> None:
    executor = world.executor(python=sys.executable)
    (handle,) = executor.launch_replicas(
        1,
        "bundled",
        {"args": ["a", "b c"]},
        secrets={"TOKEN": "s3cr3t-1"},
        env={"DILOCO_CODE_DIR": str(tmp_path / "code")},
        code=code_in(tmp_path / "rendezvous"),
    )
    status = end_of(executor, handle)
    said = text_of(executor, handle)
    assert status.cause is Cause.DONE, said
    assert 'ran [["a", "b c"], "0"]' in said


# Who, where, and what is allowed


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
