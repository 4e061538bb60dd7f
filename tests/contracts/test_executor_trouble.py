"""Backends that are away, slow, or will not: what helps is said, and nothing is taken for dead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from executors.base import (
    JobState,
    NeedsPerson,
    NoCapacity,
    ReplicaHandle,
    ReplicaSpec,
    RetryLater,
    ServerlessExecutor,
)
from tests.executors.worlds import World, end_of, every_world, launch, number_in, wait_for

pytestmark = pytest.mark.processes

CALLS: dict[str, Callable[[ServerlessExecutor, ReplicaHandle], object]] = {
    "poll": lambda executor, handle: executor.poll([handle]),
    "find": lambda executor, _: executor.find("run-0-1"),
    "live": lambda executor, _: executor.live(),
    "logs": lambda executor, handle: list(executor.logs(handle)),
    "cancel": lambda executor, handle: executor.cancel([handle]),
    "launch": lambda executor, _: launch(executor, "exit", 0, key="run-9-9"),
    "collect": lambda executor, handle: executor.collect([handle], 0),
    "check": lambda executor, _: executor.check(),
}


@every_world("server")
def test_a_backend_that_is_away_is_asked_again_later(world: World, tmp_path: Path) -> None:
    handle = launch(world.executor(), "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    executor = world.executor()
    executor.poll([handle])
    world.stop()
    for name, call in CALLS.items():
        try:
            found = call(executor, handle)
        except RetryLater as error:
            assert str(error), f"{name}: expected a reason"
        else:
            raise AssertionError(f"{name}: expected RetryLater, found {found!r}")
    world.start()
    (status,) = executor.poll([handle])
    assert status.state is JobState.RUNNING
    assert executor.find("run-0-1") == handle
    executor.cancel([handle])
    end_of(executor, handle)


@every_world("server")
def test_collect_waits_out_a_backend_that_is_away(world: World) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0)
    world.stop()
    polled = executor.poll

    def poll_and_return(handles: list[ReplicaHandle]) -> object:
        try:
            return polled(handles)
        except RetryLater:
            world.start()
            raise

    executor.poll = poll_and_return  # type: ignore[method-assign, assignment]
    assert end_of(executor, handle).cause == "done"


@every_world("server")
def test_a_slow_backend_is_waited_for(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    world.slow(0.3)
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    wait_for(lambda: executor.poll([handle])[0].state is JobState.RUNNING, "running")
    assert executor.find("run-0-1") == handle
    executor.cancel([handle])
    world.slow(0)
    end_of(executor, handle)


@every_world("impatient", "server")
def test_a_backend_that_does_not_answer_is_asked_again_later(world: World, tmp_path: Path) -> None:
    handle = launch(world.executor(), "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    world.slow(4)
    executor = world.impatient()
    with pytest.raises(RetryLater):
        executor.poll([handle])
    with pytest.raises(RetryLater):
        executor.find("run-0-1")
    world.slow(0)
    patient = world.executor()
    patient.cancel([handle])
    end_of(patient, handle)


@every_world("quota")
def test_a_refusal_is_reported_with_its_reason_and_starts_nothing(world: World) -> None:
    """Whether it is retried or requires intervention depends on the message: test_refusals.py."""
    executor = world.executor()
    said = "The account-level limit for 4 instances was reached; ask for 5"
    world.refuse_quota(said)
    with pytest.raises((NeedsPerson, NoCapacity), match="limit for 4 instances was reached"):
        launch(executor, "exit", 0)
    assert executor.live() == []
    world.refuse_quota(None)
    assert end_of(executor, launch(executor, "exit", 0)).cause == "done"


@every_world("credentials")
def test_wrong_credentials_need_a_person_and_are_not_repeated(world: World) -> None:
    executor = world.executor(credentials=dict(world.wrong_credentials))
    for call in (
        executor.check,
        executor.live,
        lambda: executor.find("run-0-1"),
        lambda: launch(executor, "exit", 0, own_secrets={"TOKEN": "s3cr3t-9d2f"}),
    ):
        with pytest.raises(NeedsPerson) as caught:
            call()
        said = str(caught.value)
        assert said
        for secret in ("s3cr3t-9d2f", *world.wrong_credentials.values()):
            assert secret not in said


@every_world("credentials")
def test_one_process_works_with_two_credentials(world: World) -> None:
    good, bad = world.executor(), world.executor(credentials=dict(world.wrong_credentials))
    good.check()
    with pytest.raises(NeedsPerson):
        bad.check()
    assert end_of(good, launch(good, "exit", 0)).cause == "done"


@every_world()
def test_check_says_who_we_are(world: World) -> None:
    assert world.executor().check().strip()


@every_world()
def test_preflight_finds_nothing_wrong_with_what_runs(world: World) -> None:
    executor = world.executor()
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, timeout_s=3600)
    assert executor.preflight(spec, 2) == []
    assert executor.live() == []


@every_world()
def test_preflight_names_the_field_that_cannot_be(world: World) -> None:
    executor = world.executor()
    spec = ReplicaSpec(launch_key="run-0-1", replica=0)
    able = executor.capabilities
    wrong: dict[str, object] = {"region": "no-such-region-1"}
    if able.max_lifetime_s is not None:
        wrong["timeout_s"] = able.max_lifetime_s + 3600
    if not able.spot:
        wrong["spot"] = True
    if not able.images:
        wrong["image"] = "python:3.11-slim"
    for field, value in wrong.items():
        changed = dataclasses.replace(spec, **{field: value})
        fields = [problem.field for problem in executor.preflight(changed, 1)]
        assert fields == [field], f"{field}={value!r}: found {fields}"


@every_world()
def test_an_unknown_key_is_no_job(world: World) -> None:
    executor = world.executor()
    assert executor.find("nobody") is None
    executor.cancel([])
    assert executor.poll([]) == []
