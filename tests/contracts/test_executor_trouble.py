"""Backends that are down, slow or refuse: each failure has its error, and jobs are not ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from executors.base import (
    AccountError,
    JobState,
    LaunchRefused,
    NoCapacity,
    ReplicaHandle,
    ReplicaSpec,
    RetryLater,
)
from executors.executor import Executor
from tests.executors.harnesses import Harness, end_of, every_harness, launch, number_in, wait_for

pytestmark = pytest.mark.processes

CALLS: dict[str, Callable[[Executor, ReplicaHandle], object]] = {
    "poll": lambda executor, handle: executor.poll([handle]),
    "find": lambda executor, _: executor.find("run-0-1"),
    "live": lambda executor, _: executor.live(),
    "logs": lambda executor, handle: list(executor.logs(handle)),
    "cancel": lambda executor, handle: executor.cancel([handle]),
    "launch": lambda executor, _: launch(executor, "exit", 0, key="run-9-9"),
    "collect": lambda executor, handle: executor.collect([handle], 0),
    "check": lambda executor, _: executor.check(),
}


@every_harness("server")
def test_backend_that_is_down_raises_retry_later(harness: Harness, tmp_path: Path) -> None:
    handle = launch(harness.executor(), "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    executor = harness.executor()
    executor.poll([handle])
    harness.stop()
    for name, call in CALLS.items():
        try:
            result = call(executor, handle)
        except RetryLater as error:
            assert str(error), f"{name}: expected a reason"
        else:
            raise AssertionError(f"{name}: expected RetryLater, found {result!r}")
    harness.start()
    (status,) = executor.poll([handle])
    assert status.state is JobState.RUNNING
    assert executor.find("run-0-1") == handle
    executor.cancel([handle])
    end_of(executor, handle)


@every_harness("server")
def test_collect_waits_for_a_backend_that_is_down(harness: Harness) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 0)
    harness.stop()
    polled = executor.poll

    def poll_and_return(handles: list[ReplicaHandle]) -> object:
        try:
            return polled(handles)
        except RetryLater:
            harness.start()
            raise

    executor.poll = poll_and_return  # type: ignore[method-assign, assignment]
    assert end_of(executor, handle).cause == "done"


@every_harness("server")
def test_slow_backend_is_awaited(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    harness.slow(0.3)
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    wait_for(lambda: executor.poll([handle])[0].state is JobState.RUNNING, "running")
    assert executor.find("run-0-1") == handle
    executor.cancel([handle])
    harness.slow(0)
    end_of(executor, handle)


@every_harness("impatient", "server")
def test_backend_that_does_not_respond_raises_retry_later(harness: Harness, tmp_path: Path) -> None:
    handle = launch(harness.executor(), "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    harness.slow(4)
    executor = harness.impatient()
    with pytest.raises(RetryLater):
        executor.poll([handle])
    with pytest.raises(RetryLater):
        executor.find("run-0-1")
    harness.slow(0)
    patient = harness.executor()
    patient.cancel([handle])
    end_of(patient, handle)


@every_harness("quota")
def test_refusal_has_its_reason_and_starts_no_job(harness: Harness) -> None:
    """The message decides whether a refusal is retried (see test_refusals.py)."""
    executor = harness.executor()
    message = "The account-level limit for 4 instances was reached; ask for 5"
    harness.refuse_quota(message)
    with pytest.raises((AccountError, NoCapacity), match="limit for 4 instances was reached"):
        launch(executor, "exit", 0)
    assert executor.live() == []
    harness.refuse_quota(None)
    assert end_of(executor, launch(executor, "exit", 0)).cause == "done"


@every_harness("credentials")
def test_wrong_credentials_raise_account_error_and_are_not_shown(harness: Harness) -> None:
    executor = harness.executor(credentials=dict(harness.wrong_credentials))
    for call in (
        executor.check,
        executor.live,
        lambda: executor.find("run-0-1"),
        lambda: launch(executor, "exit", 0, own_secrets={"TOKEN": "s3cr3t-9d2f"}),
    ):
        with pytest.raises(AccountError) as caught:
            call()
        message = str(caught.value)
        assert message
        for secret in ("s3cr3t-9d2f", *harness.wrong_credentials.values()):
            assert secret not in message


@every_harness("credentials")
def test_one_process_uses_two_credentials(harness: Harness) -> None:
    good, bad = harness.executor(), harness.executor(credentials=dict(harness.wrong_credentials))
    good.check()
    with pytest.raises(AccountError):
        bad.check()
    assert end_of(good, launch(good, "exit", 0)).cause == "done"


@every_harness()
def test_check_returns_the_account(harness: Harness) -> None:
    assert harness.executor().check().strip()


@every_harness()
def test_preflight_passes_a_valid_spec(harness: Harness) -> None:
    executor = harness.executor()
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, timeout_s=3600)
    assert executor.preflight(spec, 2) == []
    assert executor.live() == []


@every_harness()
def test_preflight_names_the_invalid_field(harness: Harness) -> None:
    executor = harness.executor()
    spec = ReplicaSpec(launch_key="run-0-1", replica=0)
    capabilities = executor.capabilities
    wrong: dict[str, object] = {"region": "no-such-region-1"}
    if capabilities.max_lifetime_s is not None:
        wrong["timeout_s"] = capabilities.max_lifetime_s + 3600
    if not capabilities.spot:
        wrong["spot"] = True
    if not capabilities.images:
        wrong["image"] = "python:3.11-slim"
    for field, value in wrong.items():
        changed = dataclasses.replace(spec, **{field: value})
        fields = [problem.field for problem in executor.preflight(changed, 1)]
        assert fields == [field], f"{field}={value!r}: found {fields}"
    for field in {"timeout_s", "spot", "image"} & set(wrong):
        with pytest.raises(LaunchRefused, match=f"^{field}: "):
            launch(executor, "exit", 0, **{field: wrong[field]})
    assert executor.live() == []


@every_harness()
def test_unknown_key_has_no_job(harness: Harness) -> None:
    executor = harness.executor()
    assert executor.find("unknown") is None
    executor.cancel([])
    assert executor.poll([]) == []
