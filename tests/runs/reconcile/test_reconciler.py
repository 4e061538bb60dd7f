"""The reconciler's tick: states of replicas and runs from beats, jobs and records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.store.base import LocalStore, StoreUnavailable
from executors.base import Cause, JobState, ReplicaStatus
from runs.models import Event
from runs.reconcile.decisions import SLOW_START_S
from runs.reconcile.reconciler import LOST_TASK_AFTER, reconcile_run
from runs.reconcile.retry_policy import BACKOFF_S
from tests.runs.world import incarnation

MAX_RESTARTS = 3
pytestmark = pytest.mark.django_db
MakeWorld = Callable[..., Any]
LATE_S = LOST_TASK_AFTER.total_seconds() + 1


def states(world: Any) -> list[str]:
    return list(world.run.replicas.values_list("state", flat=True))


def test_a_run_comes_up(make_world: MakeWorld) -> None:
    world = make_world(replicas=3)
    assert (world.run.state, states(world)) == ("provisioning", ["provisioning"] * 3)
    world.bucket.beat(0, 1, "syncing")
    world.bucket.beat(1, 1, "computing", round=2)
    assert world.tick().state == "provisioning"  # two of three, and no step yet
    assert states(world) == ["syncing", "computing", "provisioning"]
    replica = world.replica(1)
    assert (replica.round, replica.host, replica.pid, replica.device) == (2, "islet", 7, "cpu")
    assert (replica.backend_state, replica.beat_at) == ("running", world.clock())
    world.bucket.beat(2, 1, "computing")
    run = world.tick()
    assert (run.state, run.started_at) == ("running", world.clock())
    assert run.state_reason == "3 of 3 replicas live"


def test_a_tick_that_finds_nothing_new_changes_nothing(
    make_world: MakeWorld, django_assert_max_num_queries: Any
) -> None:
    world = make_world()
    world.start()
    events, deltas = Event.objects.count(), len(world.deltas)
    with django_assert_max_num_queries(30):
        world.tick()
    assert Event.objects.count() == events
    assert len(world.deltas) == deltas


def test_a_change_is_published_once_with_what_changed(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.deltas.clear()
    world.bucket.segment(0, 1, losses=[5.0, 4.0])
    world.tick()
    [delta] = world.deltas
    assert delta["run"]["id"] == str(world.run.pk)
    loss, lr = delta["points"]
    assert (loss["series"], loss["replica"], loss["value"]) == ("loss", 0, [5.0, 4.0])
    assert (lr["series"], lr["step"]) == ("lr", [1, 2])
    assert "events" not in delta
    world.run.events.create(at=world.clock(), kind="note", message="from elsewhere")
    world.tick()
    assert [e["message"] for e in world.deltas[-1]["events"]] == ["from elsewhere"]
    assert len(world.deltas) == 2


def test_what_the_backend_says_is_published(make_world: MakeWorld) -> None:
    world = make_world(replicas=1)
    world.executor.jobs[world.key()] = ReplicaStatus(state=JobState.PENDING)
    world.tick()
    world.deltas.clear()
    world.tick()
    world.executor.jobs[world.key()] = ReplicaStatus(state=JobState.RUNNING)
    world.tick()
    [delta] = world.deltas
    assert [r["backend_state"] for r in delta["replicas"]] == ["running"]


def test_silence_makes_suspect_and_a_beat_takes_it_back(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.beat_all(but=(1,))
    assert world.tick(6.5).state == "degraded"
    assert states(world) == ["computing", "suspect"]
    assert "expected a beat every 2 s, found none for 6 s" in world.replica(1).state_reason
    world.beat_all("waiting")
    assert world.tick().state == "running"
    assert states(world) == ["waiting", "waiting"]
    assert world.executor.launches == 2


def test_the_beats_own_idea_of_the_time_plays_no_part(make_world: MakeWorld) -> None:
    world = make_world()
    world.beat_all(wall_s=0.0)
    world.tick()
    world.bucket.beat(0, 2, wall_s=0.0)
    world.bucket.beat(1, 1, wall_s=world.clock().timestamp() + 10**6)  # the same count: no beat
    world.tick(6.5)
    assert states(world) == ["computing", "suspect"]


def test_a_backend_that_is_away_ends_nobody(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.executor.away = "503"
    for _ in range(3):
        run = world.tick(60)
    assert (run.state, states(world)) == ("stalled", ["suspect", "suspect"])
    world.executor.away = ""
    world.beat_all()
    assert world.tick().state == "running"
    assert world.run.replicas.filter(restarts__gt=0).count() == 0


def test_a_dead_replica_is_launched_again_with_backoff(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    for restart in range(1, MAX_RESTARTS + 1):
        world.executor.end(world.key(0, restart), Cause.ERROR, code=1, said="boom")
        world.beat_all(but=(0,))
        world.tick()
        replica = world.replica(0)
        assert (replica.state, replica.restarts) == ("restarting", restart)
        assert f"restart {restart} of {MAX_RESTARTS}" in replica.state_reason
        assert "error, exit code 1: boom" in replica.state_reason
        delay_s = BACKOFF_S * 2 ** (restart - 1)
        assert (replica.relaunch_at - world.clock()).total_seconds() == delay_s
        world.outbox.clear()
        world.beat_all(but=(0,))
        world.tick(delay_s - 0.5)
        assert world.outbox == []
        world.beat_all(but=(0,))
        world.tick(0.5)
        assert world.outbox == [("launch_pool", replica.pool_id)]
        world.work()
        assert world.replica(0).state == "provisioning"
        world.bucket.beat(0, 1, "computing", seq=restart + 1)
        world.beat_all(but=(0,))
        assert world.tick().state == "running"
    world.executor.end(world.key(0, MAX_RESTARTS + 1), Cause.ERROR, code=1, said="boom")
    world.beat_all(but=(0,))
    assert world.tick().state == "degraded"
    assert world.replica(0).state == "failed"
    assert world.replica(0).attempts.count() == MAX_RESTARTS + 1
    attempt = world.replica(0).attempts.get(number=1)
    assert (attempt.cause, attempt.exit_code, attempt.message) == ("error", 1, "boom")
    assert attempt.ended_at is not None


def test_a_run_whose_replicas_all_crash_ends_with_the_message(make_world: MakeWorld) -> None:
    world = make_world(replicas=1)
    world.start()
    for attempt in range(1, MAX_RESTARTS + 2):
        world.executor.end(world.key(0, attempt), Cause.ERROR, code=1, said="no data at /corpus")
        run = world.tick()
        if attempt <= MAX_RESTARTS:
            assert run.state == "stalled"
            assert "waiting for a relaunch" in run.state_reason
            world.tick(60)
            world.work()
            assert world.executor.launches == attempt + 1
    assert (run.state, run.ended_at) == ("failed", world.clock())
    assert run.state_reason == "replica 0: error, exit code 1: no data at /corpus"
    launches = world.executor.launches
    world.tick(600)
    world.work()
    assert world.executor.launches == launches


def test_refused_replicas_end_the_run_at_once(make_world: MakeWorld) -> None:
    world = make_world()
    for number in (0, 1):
        world.executor.end(world.key(number), Cause.LOST)
    world.tick()
    world.executor.refuses = "no such hardware: gpu9"
    world.tick(10)
    world.work()
    run = world.tick()
    assert run.state == "failed"
    assert "no such hardware: gpu9" in run.state_reason


def test_a_job_whose_launch_was_lost_is_found_by_its_key(make_world: MakeWorld) -> None:
    """The worker died between the backend's answer and writing it down."""
    world = make_world()
    world.replica(0).attempts.update(handle=None)
    world.tick()
    assert world.replica(0).attempts.get().handle["launch_key"] == world.key(0)
    assert world.executor.launches == 2


def test_launches_that_got_lost_are_called_for_again(make_world: MakeWorld) -> None:
    world = make_world()
    replica = world.replica(0)
    del world.executor.jobs[world.key(0)]
    replica.attempts.update(handle=None)
    world.tick(1)
    assert world.outbox == []
    world.tick(LATE_S)
    assert world.outbox == [("launch_pool", replica.pool_id)]
    world.work()
    assert world.executor.launches == 3
    assert replica.attempts.count() == 1


def test_a_lost_submission_is_called_for_again(
    make_run: Any, clock: Any, outbox: list[Any]
) -> None:
    run = make_run()
    outbox.clear()
    reconcile_run(str(run.pk))
    assert outbox == []
    clock.pass_s(LATE_S)
    reconcile_run(str(run.pk))
    assert outbox == [("launch_run", str(run.pk))]


def test_a_bucket_that_is_away_is_told_once_and_everything_else_goes_on(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    world.start()

    def away(self: LocalStore, prefix: str, **_: Any) -> Any:
        raise StoreUnavailable("no route to bucket")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "list", away)
        world.executor.end(world.key(0), Cause.ERROR, code=1)
        for _ in range(3):
            world.tick()
        assert world.replica(0).state == "restarting"
        assert world.replica(1).state == "computing"
        [told] = world.events("store")
        assert "no route to bucket" in told
        world.tick(301)
        assert len(world.events("store")) == 2
    world.beat_all()
    world.tick()
    assert world.replica(1).state == "computing"


def test_a_beat_that_is_not_one_is_named_once(make_world: MakeWorld) -> None:
    world = make_world()
    world.bucket.beat(1, 1)
    strange = world.bucket.store.get(keys.beat(1, incarnation(1)))
    world.bucket.store.put(keys.beat(0, incarnation(0)), strange)
    world.bucket.store.put(keys.beat(1, incarnation(1)), b"{}")
    for _ in range(2):
        run = world.tick()
    first, second = world.events("refused")
    assert first == "lease of replica 0 refused: expected the lease of its own key, found another's"
    assert second.startswith("lease of replica 1 refused: Beat: expected version")
    assert run.refused_records == 2
    assert states(world) == ["provisioning"] * 2


@pytest.mark.parametrize("odd", [{"interval_s": float("nan")}, {"interval_s": float("inf")}])
def test_a_beat_no_table_can_hold_is_refused(make_world: MakeWorld, odd: dict[str, Any]) -> None:
    world = make_world()
    world.bucket.beat(0, 1, **odd)
    world.bucket.beat(1, 1, host="\ud800" * 500)
    world.tick()
    assert states(world) == ["provisioning", "computing"]
    assert len(world.events("refused")) == 1


def test_a_slow_start_is_said_once(make_world: MakeWorld) -> None:
    world = make_world()
    world.tick(SLOW_START_S - 5)
    assert world.events("slow_start") == []
    world.tick(10)
    world.tick(10)
    [told] = world.events("slow_start")
    assert "expected a first step within 120 s" in told
