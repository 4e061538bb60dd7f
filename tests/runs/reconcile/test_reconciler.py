"""The reconciler's tick: states of replicas and runs from beats, jobs and records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.store.base import LocalStore, StoreUnavailable
from executors.base import Cause, JobState, ReplicaStatus
from runs.actions import replicas_and_pools
from runs.models import Event, ReplicaAttempt
from runs.reconcile.decisions import SLOW_START_S
from runs.reconcile.reconciler import LOST_TASK_AFTER, reconcile_run
from runs.reconcile.retry_policy import BACKOFF_S
from tests.runs.run_harness import incarnation

MAX_RESTARTS = 3
pytestmark = pytest.mark.django_db
MakeHarness = Callable[..., Any]
LATE_S = LOST_TASK_AFTER.total_seconds() + 1


def states(harness: Any) -> list[str]:
    return list(harness.run.replicas.values_list("state", flat=True))


def test_a_run_starts(make_harness: MakeHarness) -> None:
    harness = make_harness(replicas=3)
    assert (harness.run.state, states(harness)) == ("provisioning", ["provisioning"] * 3)
    harness.bucket.beat(0, 1, "syncing")
    harness.bucket.beat(1, 1, "computing", round=2)
    assert harness.tick().state == "provisioning"  # two of three, and no step yet
    assert states(harness) == ["syncing", "computing", "provisioning"]
    replica = harness.replica(1)
    assert (replica.round, replica.host, replica.pid, replica.device) == (2, "islet", 7, "cpu")
    assert (replica.backend_state, replica.beat_at) == ("running", harness.clock())
    harness.bucket.beat(2, 1, "computing")
    run = harness.tick()
    assert (run.state, run.started_at) == ("running", harness.clock())
    assert run.state_reason == "3 of 3 replicas live"


def test_a_tick_that_finds_nothing_new_changes_nothing(
    make_harness: MakeHarness, django_assert_max_num_queries: Any
) -> None:
    harness = make_harness()
    harness.start()
    events, deltas = Event.objects.count(), len(harness.deltas)
    with django_assert_max_num_queries(30):
        harness.tick()
    assert Event.objects.count() == events
    assert len(harness.deltas) == deltas


@pytest.mark.parametrize("wall_s", [math.nan, 1e20, -1.0])
def test_times_that_no_job_can_have_are_ignored(make_harness: MakeHarness, wall_s: float) -> None:
    """A job whose times could not be stored would keep its run from ending."""
    harness = make_harness()
    harness.start()
    running = ReplicaStatus(
        state=JobState.RUNNING, started_wall_s=wall_s, deadline_wall_s=wall_s, ended_wall_s=wall_s
    )
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    for number in range(harness.run.replicas.count()):
        harness.executor.jobs[harness.key(number)] = dataclasses.replace(
            running, state=JobState.ENDED, cause=Cause.CANCELLED
        )
    harness.tick()
    assert harness.tick().state == "cancelled"
    assert harness.events("control") == []
    ends = ReplicaAttempt.objects.values_list("ended_at", flat=True)
    assert all(harness.run.created_at <= at <= harness.clock() for at in ends if at)
    assert None not in ends


def test_a_change_is_published_once_with_the_changed_fields(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.start()
    harness.deltas.clear()
    harness.bucket.segment(0, 1, losses=[5.0, 4.0])
    harness.tick()
    [delta] = harness.deltas
    assert delta["run"]["id"] == str(harness.run.pk)
    loss, lr = delta["points"]
    assert (loss["series"], loss["replica"], loss["value"]) == ("loss", 0, [5.0, 4.0])
    assert (lr["series"], lr["step"]) == ("lr", [1, 2])
    assert "events" not in delta
    harness.run.events.create(at=harness.clock(), kind="note", message="from elsewhere")
    harness.tick()
    assert [e["message"] for e in harness.deltas[-1]["events"]] == ["from elsewhere"]
    assert len(harness.deltas) == 2


def test_the_backend_s_status_is_published(make_harness: MakeHarness) -> None:
    harness = make_harness(replicas=1)
    harness.executor.jobs[harness.key()] = ReplicaStatus(state=JobState.PENDING)
    harness.tick()
    harness.deltas.clear()
    harness.tick()
    harness.executor.jobs[harness.key()] = ReplicaStatus(state=JobState.RUNNING)
    harness.tick()
    [delta] = harness.deltas
    assert [r["backend_state"] for r in delta["replicas"]] == ["running"]


def test_a_silent_replica_is_suspect_until_its_next_heartbeat(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.start()
    harness.beat_all(but=(1,))
    assert harness.tick(6.5).state == "degraded"
    assert states(harness) == ["computing", "suspect"]
    assert "expected a heartbeat every 2 s, found none for 6 s" in harness.replica(1).state_reason
    harness.beat_all("waiting")
    assert harness.tick().state == "running"
    assert states(harness) == ["waiting", "waiting"]
    assert harness.executor.launches == 2


def test_the_replica_s_clock_is_ignored(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.beat_all(wall_s=0.0)
    harness.tick()
    harness.bucket.beat(0, 2, wall_s=0.0)
    harness.bucket.beat(1, 1, wall_s=harness.clock().timestamp() + 10**6)  # the same count: no beat
    harness.tick(6.5)
    assert states(harness) == ["computing", "suspect"]


def test_an_unavailable_backend_ends_no_replica(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.start()
    harness.executor.away = "503"
    for _ in range(3):
        run = harness.tick(60)
    assert (run.state, states(harness)) == ("stalled", ["suspect", "suspect"])
    harness.executor.away = ""
    harness.beat_all()
    assert harness.tick().state == "running"
    assert harness.run.replicas.filter(restarts__gt=0).count() == 0


def test_a_dead_replica_is_launched_again_with_backoff(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.start()
    for restart in range(1, MAX_RESTARTS + 1):
        harness.executor.end(harness.key(0, restart), Cause.ERROR, code=1, message="boom")
        harness.beat_all(but=(0,))
        harness.tick()
        replica = harness.replica(0)
        assert (replica.state, replica.restarts) == ("restarting", restart)
        assert f"restart {restart} of {MAX_RESTARTS}" in replica.state_reason
        assert "error, exit code 1: boom" in replica.state_reason
        delay_s = BACKOFF_S * 2 ** (restart - 1)
        assert (replica.relaunch_at - harness.clock()).total_seconds() == delay_s
        harness.outbox.clear()
        harness.beat_all(but=(0,))
        harness.tick(delay_s - 0.5)
        assert harness.outbox == []
        harness.beat_all(but=(0,))
        harness.tick(0.5)
        assert harness.outbox == [("launch_pool", replica.pool_id)]
        harness.work()
        assert harness.replica(0).state == "provisioning"
        harness.bucket.beat(0, 1, "computing", seq=restart + 1)
        harness.beat_all(but=(0,))
        assert harness.tick().state == "running"
    harness.executor.end(harness.key(0, MAX_RESTARTS + 1), Cause.ERROR, code=1, message="boom")
    harness.beat_all(but=(0,))
    assert harness.tick().state == "degraded"
    assert harness.replica(0).state == "failed"
    assert harness.replica(0).attempts.count() == MAX_RESTARTS + 1
    attempt = harness.replica(0).attempts.get(number=1)
    assert (attempt.cause, attempt.exit_code, attempt.message) == ("error", 1, "boom")
    assert attempt.ended_at is not None


def test_a_run_whose_replicas_all_crash_ends_with_the_message(make_harness: MakeHarness) -> None:
    harness = make_harness(replicas=1)
    harness.start()
    for attempt in range(1, MAX_RESTARTS + 2):
        harness.executor.end(
            harness.key(0, attempt), Cause.ERROR, code=1, message="no data at /corpus"
        )
        run = harness.tick()
        if attempt <= MAX_RESTARTS:
            assert run.state == "stalled"
            assert "waiting for a relaunch" in run.state_reason
            harness.tick(60)
            harness.work()
            assert harness.executor.launches == attempt + 1
    assert (run.state, run.ended_at) == ("failed", harness.clock())
    assert run.state_reason == "replica 0: error, exit code 1: no data at /corpus"
    launches = harness.executor.launches
    harness.tick(600)
    harness.work()
    assert harness.executor.launches == launches


def test_refused_replicas_end_the_run_at_once(make_harness: MakeHarness) -> None:
    harness = make_harness()
    for number in (0, 1):
        harness.executor.end(harness.key(number), Cause.LOST)
    harness.tick()
    harness.executor.refuses = "no such hardware: gpu9"
    harness.tick(10)
    harness.work()
    run = harness.tick()
    assert run.state == "failed"
    assert "no such hardware: gpu9" in run.state_reason


def test_a_job_whose_launch_was_lost_is_found_by_its_key(make_harness: MakeHarness) -> None:
    """The worker died between the backend's response and storing it."""
    harness = make_harness()
    harness.replica(0).attempts.update(handle=None)
    harness.tick()
    assert harness.replica(0).attempts.get().handle["launch_key"] == harness.key(0)
    assert harness.executor.launches == 2


def test_lost_launches_are_enqueued_again(make_harness: MakeHarness) -> None:
    harness = make_harness()
    replica = harness.replica(0)
    del harness.executor.jobs[harness.key(0)]
    replica.attempts.update(handle=None)
    harness.tick(1)
    assert harness.outbox == []
    harness.tick(LATE_S)
    assert harness.outbox == [("launch_pool", replica.pool_id)]
    harness.work()
    assert harness.executor.launches == 3
    assert replica.attempts.count() == 1


def test_a_lost_submission_is_enqueued_again(make_run: Any, clock: Any, outbox: list[Any]) -> None:
    run = make_run()
    outbox.clear()
    reconcile_run(str(run.pk))
    assert outbox == []
    clock.pass_s(LATE_S)
    reconcile_run(str(run.pk))
    assert outbox == [("launch_run", str(run.pk))]


def test_an_unavailable_bucket_is_reported_once_and_control_continues(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness()
    harness.start()

    def away(self: LocalStore, prefix: str, **_: Any) -> Any:
        raise StoreUnavailable("no route to bucket")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "list", away)
        harness.executor.end(harness.key(0), Cause.ERROR, code=1)
        for _ in range(3):
            harness.tick()
        assert harness.replica(0).state == "restarting"
        assert harness.replica(1).state == "computing"
        [reported] = harness.events("store")
        assert "no route to bucket" in reported
        harness.tick(301)
        assert len(harness.events("store")) == 2
    harness.beat_all()
    harness.tick()
    assert harness.replica(1).state == "computing"


def test_an_invalid_heartbeat_is_reported_once(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.bucket.beat(1, 1)
    strange = harness.bucket.store.get(keys.beat(1, incarnation(1)))
    harness.bucket.store.put(keys.beat(0, incarnation(0)), strange)
    harness.bucket.store.put(keys.beat(1, incarnation(1)), b"{}")
    for _ in range(2):
        run = harness.tick()
    first, second = harness.events("refused")
    assert first == "lease of replica 0 refused: expected the lease of its own key, found another's"
    assert second.startswith("lease of replica 1 refused: Heartbeat: expected version")
    assert run.refused_records == 2
    assert states(harness) == ["provisioning"] * 2


@pytest.mark.parametrize("invalid", [{"interval_s": float("nan")}, {"interval_s": float("inf")}])
def test_a_heartbeat_out_of_range_is_refused(
    make_harness: MakeHarness, invalid: dict[str, Any]
) -> None:
    harness = make_harness()
    harness.bucket.beat(0, 1, **invalid)
    harness.bucket.beat(1, 1, host="\ud800" * 500)
    harness.tick()
    assert states(harness) == ["provisioning", "computing"]
    assert len(harness.events("refused")) == 1


def test_a_slow_start_is_reported_once(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.tick(SLOW_START_S - 5)
    assert harness.events("slow_start") == []
    harness.tick(10)
    harness.tick(10)
    [reported] = harness.events("slow_start")
    assert "expected a first step within 120 s" in reported
