"""The contract of ``executors/base.py``: launching, and the arguments and environment of a job.

Launch keys, causes, logs and failures of backends are in ``test_executor_*.py``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from executors.base import JobState, LaunchRefused, ReplicaHandle, ReplicaSpec
from executors.registry import BACKENDS
from tests.executors.harnesses import (
    Harness,
    end_of,
    every_harness,
    harness_class,
    launch,
    number_in,
    stub_env,
    text_of,
)

pytestmark = pytest.mark.processes


def test_every_backend_has_a_harness() -> None:
    assert [harness_class(name).backend for name in BACKENDS] == list(BACKENDS)


@every_harness()
def test_replicas_are_launched_with_rank_and_environment(harness: Harness) -> None:
    executor = harness.executor()
    handles = executor.launch_replicas(
        3,
        "replica_stub",
        {"args": ["env"], "rank_env": "MY_RANK"},
        env={**stub_env(), "GIVEN": "a = 'b' $c"},
    )
    assert [handle.backend for handle in handles] == [harness.backend] * 3
    assert len({handle.launch_key for handle in handles}) == 3
    for handle in handles:
        status = end_of(executor, handle)
        assert (status.cause, status.exit_code) == ("done", 0), status
    seen = [json.loads("".join(text_of(executor, handle))) for handle in handles]
    assert [env["MY_RANK"] for env in seen] == ["0", "1", "2"]
    assert {env["GIVEN"] for env in seen} == {"a = 'b' $c"}


@every_harness()
def test_arguments_arrive_unchanged(harness: Harness) -> None:
    executor = harness.executor()
    arguments = [
        "s3://bucket/a b",
        "$(HOME) $$(X)",
        "--flag=x,y",
        "'quoted' \"twice\" $HOME \\n",
        "",
        "ü",
        "x" * 700,
    ]
    handle = launch(executor, "args", *arguments)
    assert end_of(executor, handle).exit_code == 0
    assert json.loads("".join(text_of(executor, handle))) == arguments


@every_harness()
def test_replicas_are_numbered_by_their_specs(harness: Harness) -> None:
    executor = harness.executor()
    specs = [ReplicaSpec(launch_key=f"run-{n}-1", replica=n) for n in (7, 3)]
    handles = executor.launch_replicas(
        2, "replica_stub", {"args": ["env"]}, specs=specs, env=stub_env()
    )
    assert [handle.launch_key for handle in handles] == ["run-7-1", "run-3-1"]
    for handle, number in zip(handles, ("7", "3"), strict=True):
        end_of(executor, handle)
        assert json.loads("".join(text_of(executor, handle)))["REPLICA_RANK"] == number


@every_harness()
def test_secrets_arrive_and_are_not_shown(harness: Harness) -> None:
    executor = harness.executor()
    secrets = {"SHARED_TOKEN": "shared-5cf0", "OWN_TOKEN": "own-81be", "BOTH": "secret-77aa"}
    handle = launch(
        executor,
        *("digests", *secrets),
        env={"BOTH": "plain"},
        secrets={"SHARED_TOKEN": secrets["SHARED_TOKEN"], "OWN_TOKEN": "not this one"},
        own_secrets={"OWN_TOKEN": secrets["OWN_TOKEN"], "BOTH": secrets["BOTH"]},
    )
    status = end_of(executor, handle)
    *digests, argv = text_of(executor, handle)
    assert digests == [hashlib.sha256(value.encode()).hexdigest() for value in secrets.values()]
    shown = (argv, handle.to_json(), harness.description(handle), repr(status), repr(executor))
    for value in secrets.values():
        assert not [text for text in shown if value in text], f"{value} is shown"


@every_harness()
def test_labels_are_set(harness: Harness) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 0, labels={"archipelago-run": "abc123"})
    assert end_of(executor, handle).cause == "done"
    assert "abc123" in harness.description(handle)


@every_harness()
def test_status_of_a_running_job(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    (status,) = executor.collect([handle], 0)
    assert status.state in (JobState.RUNNING, JobState.PENDING)
    assert (status.cause, status.exit_code, status.ended_wall_s) == (None, None, None)
    executor.cancel([handle])
    end_of(executor, handle)


@every_harness()
def test_handle_survives_json_and_works_in_another_executor(harness: Harness) -> None:
    handle = launch(harness.executor(), "exit", 0, "output")
    again = ReplicaHandle(**json.loads(handle.to_json()))
    assert again == handle
    assert end_of(harness.executor(), again).cause == "done"
    assert text_of(harness.executor(), again) == ["output"]


@every_harness("one_poll")
def test_polling_many_jobs_needs_no_more_requests(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handles = [launch(executor, "wait", tmp_path / f"{n}", key=f"run-{n}-1") for n in range(6)]
    executor.poll(handles)  # requests of the first call only
    before = harness.requests()
    executor.poll(handles[:1])
    one = harness.requests() - before
    executor.poll(handles)
    many = harness.requests() - before - one
    assert 0 < many <= one + 1
    executor.cancel(handles)
    executor.collect(handles, 60)


@every_harness()
def test_statuses_are_in_the_order_of_the_handles(harness: Harness) -> None:
    executor = harness.executor()
    handles = [launch(executor, "exit", 3 + n, key=f"run-{n}-1") for n in range(3)]
    for handle in handles:
        end_of(executor, handle)
    for order in ((2, 0, 1), (1, 1, 2)):
        statuses = executor.poll([handles[n] for n in order])
        assert [status.started_wall_s for status in statuses] == [
            executor.poll([handles[n]])[0].started_wall_s for n in order
        ]
    assert executor.poll([]) == []


@every_harness()
def test_times_are_unix_seconds(harness: Harness) -> None:
    executor = harness.executor()
    status = end_of(executor, launch(executor, "exit", 0))
    assert status.started_wall_s is not None and status.ended_wall_s is not None
    assert 1.7e9 < status.started_wall_s <= status.ended_wall_s < 1e11


@every_harness()
def test_unknown_arguments_are_refused(harness: Harness) -> None:
    executor = harness.executor()
    with pytest.raises(ValueError, match="gpu"):
        executor.launch_replicas(1, "replica_stub", {"gpu": "H100"})
    spec = ReplicaSpec(launch_key="run-0-1", replica=0)
    with pytest.raises(ValueError, match="expected 2 specs, found 1"):
        executor.launch_replicas(2, "replica_stub", specs=[spec])
    with pytest.raises(ValueError, match="different launch key for each spec"):
        executor.launch_replicas(2, "replica_stub", specs=[spec, spec])


@every_harness()
@pytest.mark.parametrize("key", ["", "../up", "a/b", ".hidden", "-a", "a-", "A", "x" * 64])
def test_invalid_launch_key_is_refused(harness: Harness, key: str) -> None:
    with pytest.raises(LaunchRefused, match="launch key"):
        launch(harness.executor(), "exit", 0, key=key)


@every_harness()
def test_unknown_hardware_is_refused(harness: Harness) -> None:
    executor = harness.executor()
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, hardware="no-such-thing")
    with pytest.raises(LaunchRefused, match="no-such-thing"):
        executor.launch_replicas(1, "replica_stub", {"args": ["exit", 0]}, specs=[spec])
    (problem,) = executor.preflight(spec, 1)
    assert problem.field == "hardware" and "no-such-thing" in problem.message
    assert executor.preflight(dataclasses.replace(spec, hardware="cpu"), 1) == []
