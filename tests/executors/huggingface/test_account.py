"""Hugging Face Jobs: tokens, namespaces, credit, rate limits and prices."""

from __future__ import annotations

import contextlib

import pytest
from huggingface_hub import HfApi, close_session

from executors.base import (
    AccountError,
    Cause,
    LaunchRefused,
    NoCapacity,
    ReplicaSpec,
    RetryLater,
)
from executors.huggingface.executor import HFJobsExecutor
from executors.huggingface.hardware import TABLE
from executors.launching import RETRY_AFTER_CAP_S
from tests.emulators.huggingface import NO_CREDIT, ORG, TOKEN, USER, HuggingFaceHub, LimitForm
from tests.executors.harnesses import end_of, launch
from tests.executors.huggingface.harness import HuggingFaceHarness, job_id, jobs_of

pytestmark = pytest.mark.processes


# Credentials, credit and limits.


def test_missing_credit_has_the_hubs_message(hub: HuggingFaceHub, executor: HFJobsExecutor) -> None:
    hub.refuse_quota()
    with pytest.raises(AccountError) as caught:
        launch(executor, "exit", 0)
    assert str(caught.value) == f"402 Payment Required: {NO_CREDIT}"


def test_a_rate_limit_has_a_delay(hub: HuggingFaceHub, executor: HFJobsExecutor) -> None:
    handle = launch(executor, "exit", 0)
    end_of(executor, handle)
    hub.rate_limit(55)
    for call in (executor.live, lambda: executor.cancel([handle]), executor.check):
        with pytest.raises(RetryLater, match="429 Too Many Requests") as caught:
            call()
        assert caught.value.after_s == 55


def test_check_shows_the_account_that_pays(
    hub: HuggingFaceHub, harness: HuggingFaceHarness
) -> None:
    assert harness.executor().check() == f"{USER} (PRO), token 'emulated' with role write"
    org = harness.executor(namespace=ORG)
    assert org.check() == f"{ORG} (team, write) as {USER}, token 'emulated' with role write"
    handle = launch(org, "exit", 0)
    assert end_of(org, handle).cause is Cause.DONE
    assert [job.id for job in jobs_of(hub, ORG)] == [job_id(handle)]
    assert jobs_of(hub) == []


def test_a_foreign_namespace_requires_intervention(harness: HuggingFaceHarness) -> None:
    executor = harness.executor(namespace="strangers")
    with pytest.raises(AccountError, match="expected islands or archipelago, found 'strangers'"):
        executor.check()
    with pytest.raises(AccountError, match="403 Forbidden: You don't have the rights"):
        launch(executor, "exit", 0)
    (problem,) = executor.preflight(ReplicaSpec(launch_key="run-0-1", replica=0), 1)
    assert problem.field == "credential"


def test_a_wrong_token_is_found_by_the_preflight(harness: HuggingFaceHarness) -> None:
    executor = harness.executor(credentials=harness.wrong_credentials)
    (problem,) = executor.preflight(ReplicaSpec(launch_key="run-0-1", replica=0), 1)
    assert problem.field == "credential" and "Invalid user token" in problem.message


def test_without_a_credential_the_client_finds_its_own(
    harness: HuggingFaceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert USER in harness.executor(credentials={}).check()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere/token")
    with pytest.raises(AccountError, match="no token found"):
        harness.executor(credentials={}).check()


def test_only_calls_of_the_executor_have_a_timeout(harness: HuggingFaceHarness) -> None:
    impatient = harness.executor(request_timeout_s=1.0)
    stranger = HfApi(token=TOKEN, endpoint=harness.hub.url)
    with contextlib.suppress(RetryLater):  # on a busy machine
        impatient.live()
    close_session()  # like the library after a failed connection; it then creates another client
    harness.slow(2)
    with pytest.raises(RetryLater, match="timed out"):
        impatient.live()
    assert stranger.whoami()["name"] == USER


# Prices


def test_live_prices_are_a_table(harness: HuggingFaceHarness) -> None:
    table = harness.executor().hardware()
    assert table.source == f"{harness.hub.url}/api/jobs/hardware"
    listed = {hardware.name: hardware for hardware in TABLE.hardware}
    reported = {hardware.name: hardware for hardware in table.hardware}
    assert reported and reported == {name: listed[name] for name in reported}


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
        (402, NO_CREDIT, AccountError),
        (403, "You need a PRO subscription to run Jobs", AccountError),
        (403, "You have reached the limit of concurrent jobs", NoCapacity),
        (400, "flavor h200: not enough hardware capacity", NoCapacity),
        (503, "the hardware is temporarily unavailable", NoCapacity),
        (404, "Namespace not found", AccountError),
        (400, "expected one of cpu-basic -> at flavor", LaunchRefused),
        (500, "Internal Error", RetryLater),
    ],
)
def test_lack_of_capacity_differs_from_a_missing_permission(
    hub: HuggingFaceHub, executor: HFJobsExecutor, status: int, message: str, kind: type
) -> None:
    hub.refuse_quota(message, status)
    with pytest.raises(kind) as caught:
        launch(executor, "exit", 0)
    assert type(caught.value) is kind and message in str(caught.value)


def test_a_namespace_that_does_not_exist_requires_intervention(harness: HuggingFaceHarness) -> None:
    executor = harness.executor(namespace="no-such-team")
    with pytest.raises(AccountError, match="404 Not Found"):
        launch(executor, "exit", 0)
