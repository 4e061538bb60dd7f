"""What every executor does of ``executors/base.py``: launching, and what arrives in the job.

Its names, ends, logs and troubles are in ``test_executor_*.py`` beside this file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from executors.base import JobState, LaunchRefused, ReplicaHandle, ReplicaSpec
from executors.registry import BACKENDS
from tests.executors.worlds import (
    World,
    end_of,
    every_world,
    launch,
    number_in,
    present,
    stub_env,
    text_of,
)

pytestmark = pytest.mark.processes


def test_every_backend_has_a_world() -> None:
    assert present() == list(BACKENDS)


@every_world()
def test_many_are_launched_each_with_its_number_and_environment(world: World) -> None:
    executor = world.executor()
    handles = executor.launch_replicas(
        3,
        "replica_stub",
        {"args": ["env"], "rank_env": "MY_RANK"},
        env={**stub_env(), "GIVEN": "a = 'b' $c"},
    )
    assert [handle.backend for handle in handles] == [world.backend] * 3
    assert len({handle.launch_key for handle in handles}) == 3
    for handle in handles:
        status = end_of(executor, handle)
        assert (status.cause, status.exit_code) == ("done", 0), status
    seen = [json.loads("".join(text_of(executor, handle))) for handle in handles]
    assert [env["MY_RANK"] for env in seen] == ["0", "1", "2"]
    assert {env["GIVEN"] for env in seen} == {"a = 'b' $c"}


@every_world()
def test_arguments_arrive_as_they_were_given(world: World) -> None:
    executor = world.executor()
    given = [
        "s3://bucket/a b",
        "$(HOME) $$(X)",
        "--flag=x,y",
        "'quoted' \"twice\" $HOME \\n",
        "",
        "ü",
        "x" * 700,
    ]
    handle = launch(executor, "args", *given)
    assert end_of(executor, handle).exit_code == 0
    assert json.loads("".join(text_of(executor, handle))) == given


@every_world()
def test_replicas_are_numbered_by_their_specs(world: World) -> None:
    executor = world.executor()
    specs = [ReplicaSpec(launch_key=f"run-{n}-1", replica=n) for n in (7, 3)]
    handles = executor.launch_replicas(
        2, "replica_stub", {"args": ["env"]}, specs=specs, env=stub_env()
    )
    assert [handle.launch_key for handle in handles] == ["run-7-1", "run-3-1"]
    for handle, number in zip(handles, ("7", "3"), strict=True):
        end_of(executor, handle)
        assert json.loads("".join(text_of(executor, handle)))["REPLICA_RANK"] == number


@every_world()
def test_secrets_arrive_and_are_seen_nowhere_else(world: World) -> None:
    executor = world.executor()
    given = {"SHARED_TOKEN": "shared-5cf0", "OWN_TOKEN": "own-81be", "BOTH": "secret-77aa"}
    handle = launch(
        executor,
        *("digests", *given),
        env={"BOTH": "plain"},
        secrets={"SHARED_TOKEN": given["SHARED_TOKEN"], "OWN_TOKEN": "not this one"},
        own_secrets={"OWN_TOKEN": given["OWN_TOKEN"], "BOTH": given["BOTH"]},
    )
    status = end_of(executor, handle)
    *digests, argv = text_of(executor, handle)
    assert digests == [hashlib.sha256(value.encode()).hexdigest() for value in given.values()]
    shown = (argv, handle.to_json(), world.description(handle), repr(status), repr(executor))
    for value in given.values():
        assert not [text for text in shown if value in text], f"{value} is shown"


@every_world()
def test_labels_do_not_disturb(world: World) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0, labels={"archipelago-run": "abc123"})
    assert end_of(executor, handle).cause == "done"
    assert "abc123" in world.description(handle)


@every_world()
def test_it_runs_until_it_ends(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    (status,) = executor.collect([handle], 0)
    assert status.state in (JobState.RUNNING, JobState.PENDING)
    assert (status.cause, status.exit_code, status.ended_wall_s) == (None, None, None)
    executor.cancel([handle])
    end_of(executor, handle)


@every_world()
def test_a_handle_survives_json_and_works_elsewhere(world: World) -> None:
    handle = launch(world.executor(), "exit", 0, "said")
    again = ReplicaHandle.from_json(handle.to_json())
    assert again == handle
    assert end_of(world.executor(), again).cause == "done"
    assert text_of(world.executor(), again) == ["said"]


@every_world("one_poll")
def test_many_are_polled_by_as_many_requests_as_one(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handles = [launch(executor, "wait", tmp_path / f"{n}", key=f"run-{n}-1") for n in range(6)]
    executor.poll(handles)  # whatever it does only once
    before = world.requests()
    executor.poll(handles[:1])
    one = world.requests() - before
    executor.poll(handles)
    many = world.requests() - before - one
    assert 0 < many <= one + 1
    executor.cancel(handles)
    executor.collect(handles, 60)


@every_world()
def test_statuses_are_in_the_order_of_the_handles(world: World) -> None:
    executor = world.executor()
    handles = [launch(executor, "exit", 3 + n, key=f"run-{n}-1") for n in range(3)]
    for handle in handles:
        end_of(executor, handle)
    for order in ((2, 0, 1), (1, 1, 2)):
        found = executor.poll([handles[n] for n in order])
        assert [status.started_wall_s for status in found] == [
            executor.poll([handles[n]])[0].started_wall_s for n in order
        ]
    assert executor.poll([]) == []


@every_world()
def test_times_are_of_this_life(world: World) -> None:
    executor = world.executor()
    status = end_of(executor, launch(executor, "exit", 0))
    assert status.started_wall_s is not None and status.ended_wall_s is not None
    assert 1.7e9 < status.started_wall_s <= status.ended_wall_s < 1e11


@every_world()
def test_arguments_nobody_knows_are_named(world: World) -> None:
    executor = world.executor()
    with pytest.raises(ValueError, match="gpu"):
        executor.launch_replicas(1, "replica_stub", {"gpu": "H100"})
    spec = ReplicaSpec(launch_key="run-0-1", replica=0)
    with pytest.raises(ValueError, match="expected 2 specs, found 1"):
        executor.launch_replicas(2, "replica_stub", specs=[spec])
    with pytest.raises(ValueError, match="launch key of its own"):
        executor.launch_replicas(2, "replica_stub", specs=[spec, spec])


@every_world()
@pytest.mark.parametrize("key", ["", "../up", "a/b", ".hidden", "-a", "a-", "A", "x" * 64])
def test_a_key_that_not_every_backend_takes_is_refused(world: World, key: str) -> None:
    with pytest.raises(LaunchRefused, match="launch key"):
        launch(world.executor(), "exit", 0, key=key)


@every_world()
def test_hardware_nobody_knows_is_refused(world: World) -> None:
    executor = world.executor()
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, hardware="no-such-thing")
    with pytest.raises(LaunchRefused, match="no-such-thing"):
        executor.launch_replicas(1, "replica_stub", {"args": ["exit", 0]}, specs=[spec])
    (problem,) = executor.preflight(spec, 1)
    assert problem.field == "hardware" and "no-such-thing" in problem.message
    assert executor.preflight(dataclasses.replace(spec, hardware="cpu"), 1) == []
