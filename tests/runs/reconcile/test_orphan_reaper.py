"""Orphaned, stale and duplicate jobs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from executors.base import Cause, JobState, ReplicaHandle, ReplicaStatus
from runs.models import OrphanJob, ReplicaAttempt, Run
from runs.reconcile import orphan_reaper

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=2)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    made = copy_harness(started)
    seen: set[str] = set()

    def seen_before(backend: str, handle: ReplicaHandle) -> bool:
        known = handle.to_json() in seen
        seen.add(handle.to_json())
        return known

    monkeypatch.setattr(orphan_reaper, "_seen_before", seen_before)
    monkeypatch.setattr(orphan_reaper, "executor_of", lambda backend, credential: made.executor)
    return made


def running(harness: Any, key: str) -> None:
    harness.executor.jobs[key] = ReplicaStatus(state=JobState.RUNNING)


def test_a_wanted_job_is_kept(harness: Any) -> None:
    assert [orphan_reaper.reap() for _ in range(3)] == [0, 0, 0]
    assert harness.executor.cancelled == []
    assert harness.events("reaper") == []


def test_an_orphan_is_ended_at_the_second_check_and_recorded_on_its_run(harness: Any) -> None:
    key = f"{harness.run.pk.hex[:12]}-7-1"
    running(harness, key)
    assert orphan_reaper.reap() == 0
    assert harness.executor.cancelled == []
    assert orphan_reaper.reap() == 1
    assert harness.executor.cancelled == [key]
    [event] = harness.events("reaper")
    assert event == f"local runs {key}, but no attempt has its launch key: cancelled"


def test_an_orphan_of_a_deleted_run_is_ended(harness: Any) -> None:
    running(harness, "0123456789ab-0-1")
    running(harness, "unknown")
    orphan_reaper.reap()
    assert orphan_reaper.reap() == 2


def test_a_job_whose_attempt_was_closed_is_ended(harness: Any) -> None:
    ReplicaAttempt.objects.filter(replica__number=1).update(
        ended_at=harness.clock(), cause="refused"
    )
    orphan_reaper.reap()
    assert orphan_reaper.reap() == 1
    assert harness.executor.cancelled == [harness.key(1)]
    assert "its attempt has ended" in harness.events("reaper")[0]


def test_the_policy_report_ends_nothing(harness: Any, settings: Any) -> None:
    settings.REAPER_POLICY = "report"
    running(harness, "0123456789ab-0-1")
    orphan_reaper.reap()
    assert orphan_reaper.reap() == 0
    assert harness.executor.cancelled == []


@pytest.mark.parametrize(("unique", "ended"), [(True, 0), (False, 1)])
def test_a_duplicate_is_ended_if_names_are_not_unique(
    harness: Any, unique: bool, ended: int
) -> None:
    executor = harness.executor
    executor.capabilities = dataclasses.replace(executor.capabilities, unique_names=unique)
    duplicate = ReplicaHandle(backend="local", launch_key=harness.key(0), data={"job": "second"})
    executor.live = lambda: [duplicate]
    orphan_reaper.reap()
    assert orphan_reaper.reap() == ended


def test_an_unavailable_backend_is_checked_again_next_time(harness: Any) -> None:
    running(harness, "0123456789ab-0-1")
    harness.executor.away = "503"
    assert orphan_reaper.reap() == 0
    harness.executor.away = ""
    orphan_reaper.reap()
    assert orphan_reaper.reap() == 1


def test_accounts_of_long_ended_runs_are_not_checked(harness: Any) -> None:
    now = harness.clock()
    assert orphan_reaper.accounts(now) == [("local", None)]
    Run.objects.update(state="failed", ended_at=now - orphan_reaper.ACTIVE_WITHIN)
    assert orphan_reaper.accounts(now) == [("local", None)]
    harness.clock.pass_s(1)
    assert orphan_reaper.accounts(harness.clock()) == []


def test_ended_jobs_are_ignored(harness: Any) -> None:
    running(harness, "0123456789ab-0-1")
    harness.executor.end("0123456789ab-0-1", Cause.DONE)
    orphan_reaper.reap()
    assert orphan_reaper.reap() == 0


def test_orphans_are_stored_with_their_attempt_while_they_run(harness: Any, settings: Any) -> None:
    settings.REAPER_POLICY = "report"
    ended_at = harness.clock()
    ReplicaAttempt.objects.filter(replica__number=1).update(ended_at=ended_at, cause="refused")
    running(harness, "0123456789ab-0-1")
    harness.clock.pass_s(30)
    orphan_reaper.reap()
    harness.clock.pass_s(60)
    orphan_reaper.reap()
    stale = OrphanJob.objects.get(launch_key=harness.key(1))
    assert (stale.reason, stale.billed_from) == ("its attempt has ended", ended_at)
    assert stale.attempt == ReplicaAttempt.objects.get(replica__number=1)
    unknown = OrphanJob.objects.get(launch_key="0123456789ab-0-1")
    assert unknown.attempt is None
    assert unknown.billed_from == unknown.first_seen_at < unknown.seen_at
    harness.executor.end("0123456789ab-0-1", Cause.DONE)
    orphan_reaper.reap()
    assert [job.launch_key for job in OrphanJob.objects.all()] == [harness.key(1)]


def test_orphans_are_kept_while_their_account_cannot_be_listed(harness: Any, settings: Any) -> None:
    settings.REAPER_POLICY = "report"
    running(harness, "0123456789ab-0-1")
    orphan_reaper.reap()
    harness.executor.away = "503"
    orphan_reaper.reap()
    assert OrphanJob.objects.count() == 1
    OrphanJob.objects.update(seen_at=harness.clock() - orphan_reaper.FORGET_AFTER * 2)
    orphan_reaper.reap()
    assert OrphanJob.objects.count() == 0


def test_the_number_of_stored_orphans_is_bounded(
    harness: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.REAPER_POLICY = "report"
    monkeypatch.setattr(orphan_reaper, "MOST_STORED", 3)
    for n in range(5):
        running(harness, f"0123456789ab-{n}-1")
    orphan_reaper.reap()
    assert OrphanJob.objects.count() == 3


def test_a_broken_account_does_not_hold_the_others(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def executor(backend: str, credential: Any) -> Any:
        if backend == "broken":
            raise TypeError("a backend's own error")
        return harness.executor

    monkeypatch.setattr(orphan_reaper, "executor_of", executor)
    monkeypatch.setattr(orphan_reaper, "accounts", lambda now: [("broken", None), ("local", None)])
    running(harness, "0123456789ab-0-1")
    orphan_reaper.reap()
    assert orphan_reaper.reap() == 1


def test_a_broken_account_does_not_hold_deletions(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runs import tasks

    def broken(now: Any) -> Any:
        raise RuntimeError("no accounts")

    sent: list[Any] = []
    monkeypatch.setattr(tasks, "lease", lambda name: contextlib.nullcontext(True))
    monkeypatch.setattr(tasks, "enqueue", lambda *call: sent.append(call))
    monkeypatch.setattr(orphan_reaper, "accounts", broken)
    Run.objects.update(state="failed", delete_requested_at=harness.clock())
    harness.clock.pass_s(600)
    with pytest.raises(RuntimeError, match="no accounts"):
        tasks.reap()
    assert sent == [("delete_run", str(harness.run.pk))]


def test_a_handle_without_data_is_no_duplicate(harness: Any) -> None:
    """A journal can have such a handle."""
    executor = harness.executor
    executor.capabilities = dataclasses.replace(executor.capabilities, unique_names=False)
    attempts = ReplicaAttempt.objects.filter(replica__number=0)
    attempts.update(handle={"backend": "local", "launch_key": harness.key(0)})
    executor.live = lambda: [ReplicaHandle(backend="local", launch_key=harness.key(0))]
    orphan_reaper.reap()
    assert orphan_reaper.reap() == 0
