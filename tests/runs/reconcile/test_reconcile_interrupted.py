"""Ticks that were killed half-way, launches that never came to be, a bucket that does not answer:
nothing waits for ever, and nothing is concluded from what could not be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.records import Command
from diloco.store.base import StoreDenied, StoreUnavailable
from executors.base import Cause
from runs.actions import replicas_and_pools
from runs.exceptions import LaunchLater
from runs.ingest.validation import REFUSAL_EVENTS
from runs.models import Run
from runs.queries.selectors import points
from runs.reconcile.jobs import UNLAUNCHED_AFTER
from runs.reconcile.launch import launch_replica, launch_run
from runs.reconcile.reconciler import STORE_AWAY_FOR, reconcile_run

pytestmark = pytest.mark.django_db
MakeWorld = Callable[..., Any]


class Killed(BaseException):
    """What a SIGKILL looks like to the code: nothing catches it."""


@pytest.fixture
def world(make_world: MakeWorld) -> Any:
    made = make_world(replicas=2)
    made.start()
    return made


@pytest.fixture
def half_launched(make_run: Any, clock: Any, executor: Any, outbox: Any) -> Any:
    """A run whose launch keys are written down and whose backend was away when it was called."""
    run = make_run(replicas=2)
    launch_run(str(run.pk))
    executor.away = "no answer"
    for replica in run.replicas.all():
        with pytest.raises(LaunchLater):
            launch_replica(replica.pk)
    executor.away = ""
    run.refresh_from_db()
    return run


def states(run: Any) -> list[str]:
    return list(run.replicas.order_by("number").values_list("state", flat=True))


def bucket_says(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr("runs.ingest.ingest_pass._read", refuse)


def test_a_tick_killed_before_it_judged_an_end_is_made_good(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.executor.end(world.key(1), Cause.ERROR, code=1, said="boom")

    def die(_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("runs.reconcile.replicas.judge_replicas", die)
        with pytest.raises(Killed):
            world.tick()
    assert world.replica(1).attempts.get().ended_at is not None
    assert states(world.run) == ["computing", "computing"]
    world.beat_all(but=(1,))
    world.tick()
    assert states(world.run) == ["computing", "restarting"]
    assert "boom" in world.replica(1).state_reason


def test_a_clean_exit_is_not_judged_without_the_bucket(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.bucket.final(1)
    for key in world.executor.jobs:
        world.executor.end(key, Cause.DONE, code=0)
    with monkeypatch.context() as patch:
        bucket_says(patch, StoreUnavailable("503"))
        assert world.tick().state == "running"
    assert states(world.run) == ["computing", "computing"]
    assert world.tick().state == "succeeded"
    assert states(world.run) == ["done", "done"]


def test_a_stop_waits_for_the_result_in_a_bucket_that_is_away(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.tick()
    world.bucket.final(1, "stopped")
    for key in world.executor.jobs:
        world.executor.end(key, Cause.DONE, code=0)
    with monkeypatch.context() as patch:
        bucket_says(patch, StoreUnavailable("503"))
        assert world.tick(60).state == "stopping"
    run = world.tick()
    assert (run.state, run.state_reason) == ("cancelled", "stopped by olga at round 1")


@pytest.mark.parametrize(
    ("error", "waits_s"),
    [(StoreUnavailable("503"), STORE_AWAY_FOR.total_seconds()), (StoreDenied("gone"), 0.0)],
)
def test_a_stop_does_not_wait_for_ever(
    world: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, waits_s: float
) -> None:
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    for key in world.executor.jobs:
        world.executor.end(key, Cause.DONE, code=0)
    bucket_says(monkeypatch, error)
    if waits_s:
        assert world.tick(waits_s - 5).state == "stopping"
    assert world.tick(10).state == "cancelled"


def test_a_launch_that_never_came_to_be_does_not_hold_up_a_stop(
    half_launched: Any, clock: Any, executor: Any
) -> None:
    run = half_launched
    replicas_and_pools.request_stop(run, actor=run.owner)
    for after_s, expected in ((UNLAUNCHED_AFTER.total_seconds(), "stopping"), (1, "cancelled")):
        clock.pass_s(after_s)
        reconcile_run(str(run.pk))
        run.refresh_from_db()
        assert run.state == expected
    assert states(run) == ["evicted", "evicted"]
    for replica in run.replicas.all():
        launch_replica(replica.pk)  # the message comes again
    assert executor.launches == 0


def test_a_backend_that_cannot_be_asked_calls_nothing_off(
    half_launched: Any, clock: Any, executor: Any
) -> None:
    run = half_launched
    replicas_and_pools.request_stop(run, actor=run.owner)
    executor.away = "no answer"  # it may have a job of ours
    clock.pass_s(600)
    reconcile_run(str(run.pk))
    run.refresh_from_db()
    assert run.state == "stopping"


def test_a_replica_can_leave_before_it_was_launched(
    half_launched: Any, clock: Any, executor: Any
) -> None:
    run = half_launched
    replicas_and_pools.stop_replica(run.replicas.get(number=0), actor=run.owner)
    replicas_and_pools.restart_replica(run.replicas.get(number=1), actor=run.owner)
    clock.pass_s(UNLAUNCHED_AFTER.total_seconds() + 1)
    reconcile_run(str(run.pk))
    assert states(run) == ["evicted", "restarting"]
    launch_replica(run.replicas.get(number=1).pk)
    assert states(run) == ["evicted", "provisioning"]
    assert list(executor.jobs) == [run.replicas.get(number=1).attempts.get(number=2).launch_key]


def test_a_launch_that_comes_through_after_it_was_called_off_is_cancelled(
    half_launched: Any, clock: Any, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = half_launched
    replica = run.replicas.get(number=0)
    launch = executor.ensure

    def slowly(*args: Any, **more: Any) -> Any:
        replicas_and_pools.stop_replica(replica, actor=run.owner)
        clock.pass_s(UNLAUNCHED_AFTER.total_seconds() + 1)
        reconcile_run(str(run.pk))
        return launch(*args, **more)

    monkeypatch.setattr(executor, "ensure", slowly)
    launch_replica(replica.pk)
    assert executor.cancelled == list(executor.jobs) == [replica.attempts.get().launch_key]


def test_a_command_nobody_can_read_does_not_keep_a_run_from_stopping(world: Any) -> None:
    store = world.bucket.store
    store.create(keys.control(1), b"garbage")
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.tick()
    assert Command.from_bytes(store.get(keys.control(2))).command == "stop"
    assert len(world.events("refused")) == 1


def test_an_evaluation_read_before_its_commit_is_dated_by_it(world: Any) -> None:
    world.bucket.segment(0, 1, evaluations=(world.bucket.evaluation(1, 4.0),))
    world.beat_all()
    world.tick()
    assert world.run.rounds.get(number=1).eval_loss == 4.0
    world.bucket.commit(1, [0, 1])
    world.beat_all()
    world.tick()
    row = world.run.rounds.get(number=1)
    assert (row.state, row.eval_loss) == ("committed", 4.0)
    assert points(world.run, "eval_loss")["tokens"] == [row.tokens_total]


def test_what_lies_in_the_bucket_is_not_counted_again_at_every_look(world: Any) -> None:
    for number in range(REFUSAL_EVENTS + 10):
        world.bucket.store.put(keys.checkpoint_manifest(number), b"{}")
    for last in (REFUSAL_EVENTS + 10, REFUSAL_EVENTS + 11):
        for number in range(1, last + 1):
            world.bucket.commit(number, [0, 1])
        world.beat_all()
        world.tick()
        assert Run.objects.get().refused_records == REFUSAL_EVENTS
