"""Money: what attempts and the run have cost, and what a budget does."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from executors.base import Cause, JobState, PendingCause, ReplicaStatus
from runs.exceptions import InvalidRun
from runs.reconcile.billing import cost_usd
from runs.submit.run_draft import PoolDraft

pytestmark = pytest.mark.django_db
T = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.UTC)
HOUR = datetime.timedelta(hours=1)


@pytest.mark.parametrize(
    ("times", "price", "cost"),
    [
        ({"launched_at": T}, 2.0, 6.0),
        ({"launched_at": T, "started_at": T + HOUR}, 2.0, 4.0),
        ({"launched_at": T, "started_at": T, "ended_at": T + HOUR}, 2.0, 2.0),
        ({}, 2.0, 0.0),
        ({"launched_at": T}, None, None),
        ({"launched_at": T + 9 * HOUR}, 2.0, 0.0),
        ({"launched_at": T, "ended_at": T + HOUR}, 2.0, 0.0),
        ({"launched_at": T, "ended_at": T + HOUR, "billed_s": 1800.0}, 2.0, 1.0),
    ],
)
def test_an_attempt_costs_its_hours(
    times: dict[str, Any], price: float | None, cost: float | None
) -> None:
    given = {"launched_at": None, "started_at": None, "ended_at": None, **times}
    assert cost_usd(price_usd_h=price, now=T + 3 * HOUR, **given) == cost


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    made = make_world(replicas=2, pools=(PoolDraft(count=2, price_usd_h=36.0),), budget_usd=1.0)
    made.start()
    return made


def tick(world: Any, after_s: float) -> Any:
    world.beat_all()
    return world.tick(after_s)


def test_the_run_is_the_sum_of_its_attempts(world: Any) -> None:
    tick(world, 19)  # two at a cent a second, a second of it in start()
    assert world.run.cost_usd == pytest.approx(0.40)
    world.executor.end(world.key(1), Cause.LOST)
    tick(world, 1)
    ended = world.replica(1).attempts.get()
    assert ended.cost_usd == pytest.approx(0.21)
    tick(world, 10)
    assert world.replica(1).attempts.get(number=1).cost_usd == ended.cost_usd
    total = sum(a.cost_usd for r in world.run.replicas.all() for a in r.attempts.all())
    assert world.run.cost_usd == pytest.approx(total)


def test_what_waits_for_a_machine_costs_nothing(world: Any) -> None:
    world.executor.jobs[world.key(1)] = ReplicaStatus(state=JobState.PENDING)
    tick(world, 19)
    assert world.replica(1).attempts.get().cost_usd == 0.0
    assert world.replica(0).attempts.get().cost_usd == pytest.approx(0.20)


def test_what_was_cancelled_before_it_began_costs_nothing(world: Any) -> None:
    world.run.replicas.get(number=1).attempts.update(started_at=None)  # it has not begun
    world.executor.jobs[world.key(1)] = ReplicaStatus(state=JobState.PENDING)
    world.beat_all(but=(1,))
    world.tick(600)
    world.executor.end(world.key(1), Cause.CANCELLED)
    world.beat_all(but=(1,))
    world.tick(1)
    attempt = world.replica(1).attempts.get(number=1)
    assert attempt.ended_at is not None
    assert (attempt.started_at, attempt.cost_usd) == (None, 0.0)


@pytest.mark.parametrize("evidence", ["it was seen to run", "a beat came", "its backend says when"])
def test_what_ran_costs_from_its_start_also_where_the_start_was_not_seen(
    make_world: Callable[..., Any], evidence: str
) -> None:
    world = make_world(replicas=2, pools=(PoolDraft(count=2, price_usd_h=36.0),))
    key, began = world.key(1), world.clock()
    world.executor.jobs[key] = ReplicaStatus(state=JobState.PENDING)
    world.tick(10)
    if evidence == "it was seen to run":
        world.executor.jobs[key] = ReplicaStatus(state=JobState.RUNNING)
    elif evidence == "a beat came":
        world.beat_all()
    world.tick(10)
    world.clock.pass_s(80)
    world.executor.jobs[key] = ReplicaStatus(
        state=JobState.ENDED, cause=Cause.CANCELLED, ended_wall_s=world.clock().timestamp(),
        started_wall_s=began.timestamp() + 60 if evidence == "its backend says when" else None,
    )  # fmt: skip
    world.tick(1)
    cost = world.replica(1).attempts.get().cost_usd
    assert cost == pytest.approx(0.40 if evidence == "its backend says when" else 1.00)


def test_a_budget_that_is_reached_drains_the_run_first(world: Any) -> None:
    assert tick(world, 48).state == "running"
    run = tick(world, 12)
    assert (run.state, run.state_reason) == ("stopping", "budget of $1.00 reached")
    assert world.executor.cancelled == []
    tick(world, 1)
    assert run.__class__.objects.get(pk=run.pk).stop_sent_at is not None
    tick(world, 31)
    assert len(world.executor.cancelled) == 2


def test_an_unknown_price_is_not_nothing(make_world: Callable[..., Any], settings: Any) -> None:
    world = make_world(replicas=2)
    world.run.pools.update(price_usd_h=None)
    world.run.replicas.get(number=0).attempts.update(price_usd_h=None, cost_usd=None)
    world.start()
    tick(world, 100)
    assert world.replica(0).attempts.get().cost_usd is None


def test_a_budget_needs_prices(make_run: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setattr("runs.submit.create.pool_price", lambda pool: None)
    with pytest.raises(InvalidRun) as caught:
        make_run(budget_usd=5.0)
    assert caught.value.field == "pools.0.price_usd_h"


def test_a_gang_that_does_not_come_together_is_called_off(make_world: Callable[..., Any]) -> None:
    world = make_world(replicas=3, start_timeout_s=100)
    world.bucket.beat(0, 1, "waiting")
    world.tick()
    world.bucket.beat(0, 2, "waiting")
    world.tick(90)
    assert world.run.state != "stopping"
    world.bucket.beat(0, 3, "waiting")
    run = world.tick(20)
    assert run.state == "stopping"
    assert run.state_reason == ("expected a first step within 100 s, found 1 of 3 replicas there")


def test_a_job_that_its_queue_suspends_costs_nothing_meanwhile(world: Any) -> None:
    """Kueue preempts by suspending; the same job runs again later."""
    tick(world, 19)
    attempt = world.replica(1).attempts.get()
    before = attempt.cost_usd
    assert before == pytest.approx(0.20)
    queued = ReplicaStatus(state=JobState.PENDING, pending=PendingCause.QUEUED)
    for _ in range(3):
        world.executor.jobs[world.key(1)] = queued
        world.beat_all(but=(1,))
        world.tick(10)
        attempt.refresh_from_db()
        assert attempt.cost_usd == before
    again_s = world.clock().timestamp()
    world.executor.jobs[world.key(1)] = ReplicaStatus(
        state=JobState.RUNNING, started_wall_s=again_s
    )
    tick(world, 10)
    attempt.refresh_from_db()
    assert attempt.cost_usd == pytest.approx(before + 0.10)
    world.executor.jobs[world.key(1)] = queued
    world.beat_all(but=(1,))
    world.tick(500)
    world.executor.end(world.key(1), Cause.CANCELLED)
    world.beat_all(but=(1,))
    world.tick(500)
    attempt.refresh_from_db()
    assert attempt.ended_at is not None
    assert attempt.cost_usd == pytest.approx(before + 0.10)
