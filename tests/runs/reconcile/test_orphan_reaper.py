"""Jobs nobody knows, nobody wants, or that are there twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from executors.base import Cause, JobState, ReplicaHandle, ReplicaStatus
from runs.models import ReplicaAttempt, Run
from runs.reconcile import orphan_reaper

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(make_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    made = make_world(replicas=2)
    made.start()
    seen: set[str] = set()

    def seen_before(backend: str, handle: ReplicaHandle) -> bool:
        known = handle.to_json() in seen
        seen.add(handle.to_json())
        return known

    monkeypatch.setattr(orphan_reaper, "_seen_before", seen_before)
    monkeypatch.setattr(orphan_reaper, "executor_of", lambda backend, credential: made.executor)
    return made


def running(world: Any, key: str) -> None:
    world.executor.jobs[key] = ReplicaStatus(state=JobState.RUNNING)


def test_what_is_known_and_wanted_is_left_alone(world: Any) -> None:
    assert [orphan_reaper.reap() for _ in range(3)] == [0, 0, 0]
    assert world.executor.cancelled == []
    assert world.events("reaper") == []


def test_an_orphan_is_ended_on_the_second_sight_and_told_to_its_run(world: Any) -> None:
    key = f"{world.run.pk.hex[:12]}-7-1"
    running(world, key)
    assert orphan_reaper.reap() == 0
    assert world.executor.cancelled == []
    assert orphan_reaper.reap() == 1
    assert world.executor.cancelled == [key]
    [event] = world.events("reaper")
    assert event == f"local runs {key}, but no attempt has its launch key: cancelled"


def test_an_orphan_of_a_run_that_is_gone_is_ended_too(world: Any) -> None:
    running(world, "0123456789ab-0-1")
    running(world, "somebody")
    orphan_reaper.reap()
    assert orphan_reaper.reap() == 2


def test_a_job_whose_attempt_was_closed_is_ended(world: Any) -> None:
    ReplicaAttempt.objects.filter(replica__number=1).update(ended_at=world.clock(), cause="refused")
    orphan_reaper.reap()
    assert orphan_reaper.reap() == 1
    assert world.executor.cancelled == [world.key(1)]
    assert "its attempt has ended" in world.events("reaper")[0]


def test_the_policy_report_ends_nothing(world: Any, settings: Any) -> None:
    settings.REAPER_POLICY = "report"
    running(world, "0123456789ab-0-1")
    orphan_reaper.reap()
    assert orphan_reaper.reap() == 0
    assert world.executor.cancelled == []


@pytest.mark.parametrize(("unique", "ended"), [(True, 0), (False, 1)])
def test_a_twin_is_ended_where_names_are_not_unique(world: Any, unique: bool, ended: int) -> None:
    executor = world.executor
    executor.capabilities = dataclasses.replace(executor.capabilities, unique_names=unique)
    twin = ReplicaHandle(backend="local", launch_key=world.key(0), data={"job": "second"})
    executor.live = lambda: [twin]
    orphan_reaper.reap()
    assert orphan_reaper.reap() == ended


def test_a_backend_that_is_away_is_asked_again_next_time(world: Any) -> None:
    running(world, "0123456789ab-0-1")
    world.executor.away = "503"
    assert orphan_reaper.reap() == 0
    world.executor.away = ""
    orphan_reaper.reap()
    assert orphan_reaper.reap() == 1


def test_accounts_of_runs_long_over_are_not_asked(world: Any) -> None:
    now = world.clock()
    assert orphan_reaper.accounts(now) == [("local", None)]
    Run.objects.update(state="failed", ended_at=now - orphan_reaper.ACTIVE_WITHIN)
    assert orphan_reaper.accounts(now) == [("local", None)]
    world.clock.pass_s(1)
    assert orphan_reaper.accounts(world.clock()) == []


def test_ended_jobs_are_nobody_s_business(world: Any) -> None:
    running(world, "0123456789ab-0-1")
    world.executor.end("0123456789ab-0-1", Cause.DONE)
    orphan_reaper.reap()
    assert orphan_reaper.reap() == 0
