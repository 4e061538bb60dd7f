"""Hugging Face Jobs: who pays, with which token, how often it may be asked, and for how much."""

from __future__ import annotations

import pytest
from huggingface_hub import HfApi, close_session

from executors.base import (
    Cause,
    LaunchRefused,
    NeedsPerson,
    NoCapacity,
    ReplicaSpec,
    RetryLater,
)
from executors.huggingface.executor import HFJobsExecutor
from executors.huggingface.hardware import TABLE
from executors.launching import RETRY_AFTER_CAP_S
from tests.emulators.huggingface import NO_CREDIT, ORG, TOKEN, USER, HuggingFaceHub, LimitForm
from tests.executors.huggingface.world import HuggingFaceWorld, job_id, jobs_of
from tests.executors.worlds import end_of, launch

pytestmark = pytest.mark.processes


# Credentials, credit and limits.


def test_want_of_credit_is_told_in_the_hubs_words(
    hub: HuggingFaceHub, executor: HFJobsExecutor
) -> None:
    hub.refuse_quota()
    with pytest.raises(NeedsPerson) as caught:
        launch(executor, "exit", 0)
    assert str(caught.value) == f"402 Payment Required: {NO_CREDIT}"


def test_a_rate_limit_says_how_long_to_wait(hub: HuggingFaceHub, executor: HFJobsExecutor) -> None:
    handle = launch(executor, "exit", 0)
    end_of(executor, handle)
    hub.rate_limit(55)
    for call in (executor.live, lambda: executor.cancel([handle]), executor.check):
        with pytest.raises(RetryLater, match="429 Too Many Requests") as caught:
            call()
        assert caught.value.after_s == 55


def test_check_says_who_pays(hub: HuggingFaceHub, world: HuggingFaceWorld) -> None:
    assert world.executor().check() == f"{USER} (PRO), token 'emulated' with role write"
    org = world.executor(namespace=ORG)
    assert org.check() == f"{ORG} (team, write) as {USER}, token 'emulated' with role write"
    handle = launch(org, "exit", 0)
    assert end_of(org, handle).cause is Cause.DONE
    assert [job.id for job in jobs_of(hub, ORG)] == [job_id(handle)]
    assert jobs_of(hub) == []


def test_a_namespace_of_strangers_needs_a_person(world: HuggingFaceWorld) -> None:
    executor = world.executor(namespace="strangers")
    with pytest.raises(NeedsPerson, match="expected islands or archipelago, found 'strangers'"):
        executor.check()
    with pytest.raises(NeedsPerson, match="403 Forbidden: You don't have the rights"):
        launch(executor, "exit", 0)
    (problem,) = executor.preflight(ReplicaSpec(launch_key="run-0-1", replica=0), 1)
    assert problem.field == "credential"


def test_a_wrong_token_is_found_by_the_preflight(world: HuggingFaceWorld) -> None:
    executor = world.executor(credentials=world.wrong_credentials)
    (problem,) = executor.preflight(ReplicaSpec(launch_key="run-0-1", replica=0), 1)
    assert problem.field == "credential" and "Invalid user token" in problem.message


def test_without_a_credential_the_client_finds_its_own(
    world: HuggingFaceWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert USER in world.executor(credentials={}).check()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere/token")
    with pytest.raises(NeedsPerson, match="no token found"):
        world.executor(credentials={}).check()


def test_only_our_own_calls_have_a_time_limit(world: HuggingFaceWorld) -> None:
    impatient = world.executor(request_timeout_s=1.0)
    stranger = HfApi(token=TOKEN, endpoint=world.hub.url)
    impatient.live()
    close_session()  # as the library does when a connection fails; it makes another client then
    world.slow(2)
    with pytest.raises(RetryLater, match="timed out"):
        impatient.live()
    assert stranger.whoami()["name"] == USER


# What an hour costs.


def test_live_prices_are_a_table(world: HuggingFaceWorld) -> None:
    table = world.executor().hardware()
    assert table.source == f"{world.hub.url}/api/jobs/hardware"
    listed = {hardware.name: hardware for hardware in TABLE.hardware}
    told = {hardware.name: hardware for hardware in table.hardware}
    assert told and told == {name: listed[name] for name in told}


@pytest.mark.parametrize("form", ["window", "seconds", "date"])
def test_a_rate_limit_is_honoured_in_every_form(
    hub: HuggingFaceHub, executor: HFJobsExecutor, form: LimitForm
) -> None:
    hub.rate_limit(50_000, form)
    with pytest.raises(RetryLater, match="429 Too Many Requests") as caught:
        executor.live()
    assert caught.value.after_s == RETRY_AFTER_CAP_S  # bounded


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (402, NO_CREDIT, NeedsPerson),
        (403, "You need a PRO subscription to run Jobs", NeedsPerson),
        (403, "You have reached the limit of concurrent jobs", NoCapacity),
        (400, "flavor h200: not enough hardware capacity", NoCapacity),
        (503, "the hardware is temporarily unavailable", NoCapacity),
        (404, "Namespace not found", NeedsPerson),
        (400, "expected one of cpu-basic -> at flavor", LaunchRefused),
        (500, "Internal Error", RetryLater),
    ],
)
def test_a_full_hub_is_told_from_a_missing_right(
    hub: HuggingFaceHub, executor: HFJobsExecutor, status: int, message: str, kind: type
) -> None:
    hub.refuse_quota(message, status)
    with pytest.raises(kind) as caught:
        launch(executor, "exit", 0)
    assert type(caught.value) is kind and message in str(caught.value)


def test_a_namespace_that_does_not_exist_requires_intervention(world: HuggingFaceWorld) -> None:
    executor = world.executor(namespace="no-such-team")
    with pytest.raises(NeedsPerson, match="404 Not Found"):
        launch(executor, "exit", 0)
