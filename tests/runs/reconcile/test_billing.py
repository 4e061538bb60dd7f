"""Cost of attempts and of the run, and the effect of a budget."""

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


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=2, pools=(PoolDraft(count=2, price_usd_h=36.0),), budget_usd=1.0)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


def tick(harness: Any, after_s: float) -> Any:
    harness.beat_all()
    return harness.tick(after_s)


def test_the_run_is_the_sum_of_its_attempts(harness: Any) -> None:
    tick(harness, 19)  # two at a cent a second, a second of it in start()
    assert harness.run.cost_usd == pytest.approx(0.40)
    harness.executor.end(harness.key(1), Cause.LOST)
    tick(harness, 1)
    ended = harness.replica(1).attempts.get()
    assert ended.cost_usd == pytest.approx(0.21)
    tick(harness, 10)
    assert harness.replica(1).attempts.get(number=1).cost_usd == ended.cost_usd
    total = sum(a.cost_usd for r in harness.run.replicas.all() for a in r.attempts.all())
    assert harness.run.cost_usd == pytest.approx(total)


def test_a_job_waiting_for_a_machine_costs_nothing(harness: Any) -> None:
    harness.executor.jobs[harness.key(1)] = ReplicaStatus(state=JobState.PENDING)
    tick(harness, 19)
    assert harness.replica(1).attempts.get().cost_usd == 0.0
    assert harness.replica(0).attempts.get().cost_usd == pytest.approx(0.20)


def test_a_job_cancelled_before_its_start_costs_nothing(harness: Any) -> None:
    harness.run.replicas.get(number=1).attempts.update(started_at=None)  # it has not begun
    harness.executor.jobs[harness.key(1)] = ReplicaStatus(state=JobState.PENDING)
    harness.beat_all(but=(1,))
    harness.tick(600)
    harness.executor.end(harness.key(1), Cause.CANCELLED)
    harness.beat_all(but=(1,))
    harness.tick(1)
    attempt = harness.replica(1).attempts.get(number=1)
    assert attempt.ended_at is not None
    assert (attempt.started_at, attempt.cost_usd) == (None, 0.0)


@pytest.mark.parametrize(
    "evidence",
    ["a poll reports it running", "a heartbeat arrives", "its backend reports the start"],
)
def test_a_job_costs_from_its_start_even_if_the_start_was_not_observed(
    make_harness: Callable[..., Any], evidence: str
) -> None:
    harness = make_harness(replicas=2, pools=(PoolDraft(count=2, price_usd_h=36.0),))
    key, began = harness.key(1), harness.clock()
    harness.executor.jobs[key] = ReplicaStatus(state=JobState.PENDING)
    harness.tick(10)
    if evidence == "a poll reports it running":
        harness.executor.jobs[key] = ReplicaStatus(state=JobState.RUNNING)
    elif evidence == "a heartbeat arrives":
        harness.beat_all()
    harness.tick(10)
    harness.clock.pass_s(80)
    harness.executor.jobs[key] = ReplicaStatus(
        state=JobState.ENDED,
        cause=Cause.CANCELLED,
        ended_wall_s=harness.clock().timestamp(),
        started_wall_s=began.timestamp() + 60
        if evidence == "its backend reports the start"
        else None,
    )
    harness.tick(1)
    cost = harness.replica(1).attempts.get().cost_usd
    assert cost == pytest.approx(0.40 if evidence == "its backend reports the start" else 1.00)


def test_a_reached_budget_drains_the_run_first(harness: Any) -> None:
    assert tick(harness, 48).state == "running"
    run = tick(harness, 12)
    assert (run.state, run.state_reason) == ("stopping", "budget of $1.00 reached")
    assert harness.executor.cancelled == []
    tick(harness, 1)
    assert run.__class__.objects.get(pk=run.pk).stop_sent_at is not None
    tick(harness, 31)
    assert len(harness.executor.cancelled) == 2


def test_an_unknown_price_is_not_zero(make_harness: Callable[..., Any], settings: Any) -> None:
    harness = make_harness(replicas=2)
    harness.run.pools.update(price_usd_h=None)
    harness.run.replicas.get(number=0).attempts.update(price_usd_h=None, cost_usd=None)
    harness.start()
    tick(harness, 100)
    assert harness.replica(0).attempts.get().cost_usd is None


def test_a_budget_needs_prices(make_run: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setattr("runs.submit.create.pool_price", lambda pool: None)
    with pytest.raises(InvalidRun) as caught:
        make_run(budget_usd=5.0)
    assert caught.value.field == "pools.0.price_usd_h"


def test_a_run_that_does_not_start_in_time_is_stopped(make_harness: Callable[..., Any]) -> None:
    harness = make_harness(replicas=3, start_timeout_s=100)
    harness.bucket.beat(0, 1, "waiting")
    harness.tick()
    harness.bucket.beat(0, 2, "waiting")
    harness.tick(90)
    assert harness.run.state != "stopping"
    harness.bucket.beat(0, 3, "waiting")
    run = harness.tick(20)
    assert run.state == "stopping"
    assert run.state_reason == ("expected a first step within 100 s, found 1 of 3 replicas working")


def test_a_job_that_its_queue_suspends_costs_nothing_meanwhile(harness: Any) -> None:
    """Kueue preempts by suspending; the same job runs again later."""
    tick(harness, 19)
    attempt = harness.replica(1).attempts.get()
    before = attempt.cost_usd
    assert before == pytest.approx(0.20)
    queued = ReplicaStatus(state=JobState.PENDING, pending=PendingCause.QUEUED)
    for _ in range(3):
        harness.executor.jobs[harness.key(1)] = queued
        harness.beat_all(but=(1,))
        harness.tick(10)
        attempt.refresh_from_db()
        assert attempt.cost_usd == before
    again_s = harness.clock().timestamp()
    harness.executor.jobs[harness.key(1)] = ReplicaStatus(
        state=JobState.RUNNING, started_wall_s=again_s
    )
    tick(harness, 10)
    attempt.refresh_from_db()
    assert attempt.cost_usd == pytest.approx(before + 0.10)
    harness.executor.jobs[harness.key(1)] = queued
    harness.beat_all(but=(1,))
    harness.tick(500)
    harness.executor.end(harness.key(1), Cause.CANCELLED)
    harness.beat_all(but=(1,))
    harness.tick(500)
    attempt.refresh_from_db()
    assert attempt.ended_at is not None
    assert attempt.cost_usd == pytest.approx(before + 0.10)


def test_traffic_and_requests_are_part_of_the_cost(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runs.backends import price_settings

    prices = price_settings.Traffic(
        upload_usd_gb=0.02, download_usd_gb=0.09, requests_usd_million=5.0
    )
    scheme = harness.run.rendezvous.partition("://")[0]
    monkeypatch.setattr(price_settings, "_copy", price_settings._Copy(traffic={scheme: prices}))
    type(harness.run).objects.update(bytes_up=10**11, bytes_down=2 * 10**11, requests=10**6)
    tick(harness, 60)
    harness.run.refresh_from_db()
    attempts = sum(a.cost_usd or 0 for r in harness.run.replicas.all() for a in r.attempts.all())
    assert harness.run.traffic_usd == pytest.approx(2 + 18 + 5)
    assert harness.run.cost_usd == pytest.approx(attempts + 25)
    monkeypatch.setattr(price_settings, "_copy", price_settings._Copy())
    tick(harness, 60)
    harness.run.refresh_from_db()
    assert harness.run.traffic_usd == 0
