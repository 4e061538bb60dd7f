"""The maximum price of a pool holds launches, with one event, until the price falls."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from executors.base import Cause
from runs.actions import replicas_and_pools
from runs.backends import prices
from runs.backends.executors import catalogue
from runs.exceptions import InvalidRun
from runs.models import Event, ReplicaPool
from runs.models.money import MAX_USD
from runs.queries import fleet
from runs.reconcile import billing
from runs.reconcile.launch import launch_replica
from runs.reconcile.reconciler import reconcile_run
from runs.submit.clone_and_fork import clone_of
from runs.submit.create import create_run
from runs.submit.run_draft import PoolDraft
from tests.runs.launching import MakeRun, launched
from tests.runs.run_harness import Clock, FakeExecutor

pytestmark = pytest.mark.django_db


class List:
    """The price file that an administrator edits."""

    def __init__(self, path: Path) -> None:
        self.path, self.edits = path, 0

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.edits += 1
        os.utime(self.path, ns=(self.edits * 10**9, self.edits * 10**9))  # each edit is newer

    def cpu(self, usd_h: float) -> None:
        self.write(f"[local.cpu]\nprice_usd_h = {usd_h}\n")


@pytest.fixture
def prices_file(tmp_path: Path, settings: Any) -> List:
    settings.HARDWARE_FILE = tmp_path / "hardware.toml"
    made = List(settings.HARDWARE_FILE)
    made.cpu(2.0)
    return made


@pytest.fixture
def harness(make_harness: Callable[..., Any], prices_file: List) -> Any:
    made = make_harness(replicas=2, pools=(PoolDraft(count=2, max_price_usd_h=3.0),))
    made.start()
    return made


def price_events(harness: Any) -> list[tuple[str, str]]:
    result = Event.objects.filter(run=harness.run, kind=prices.KIND).order_by("id")
    return [(event.level, event.message) for event in result]


def lose(harness: Any, number: int) -> None:
    harness.executor.end(harness.key(number), Cause.LOST)
    harness.beat_all(but=(number,))
    harness.tick()


def later(harness: Any, *seconds: float) -> None:
    for after_s in seconds:
        harness.beat_all(but=(1,))
        harness.tick(after_s)
        harness.work()


def test_risen_price_holds_the_relaunch_with_one_event(harness: Any, prices_file: List) -> None:
    prices_file.cpu(4.0)
    lose(harness, 1)
    later(harness, 10, 1, 1, 1)
    replica = harness.replica(1)
    assert (replica.state, replica.attempts.count()) == ("restarting", 1)
    reason = "expected a price of at most $3 an hour, found $4"
    assert replica.state_reason == f"not launched: {reason}"
    assert price_events(harness) == [
        ("info", "2 x local cpu: $4 an hour, previously $2"),
        ("warning", f"2 x local cpu: nothing is launched: {reason}"),
    ]
    [row] = fleet.pool_rows(harness.run)
    assert (row["breaker"]["state"], row["breaker"]["last_error"]) == ("price_limit", reason)
    assert "raise the limit" in row["breaker"]["advice"]
    assert (row["price_usd_h"], row["max_price_usd_h"]) == (4.0, 3.0)
    assert harness.replica(0).state == "computing"  # running jobs continue


def test_launches_resume_at_the_new_price_when_it_falls(harness: Any, prices_file: List) -> None:
    prices_file.cpu(4.0)
    lose(harness, 1)
    later(harness, 10)
    prices_file.cpu(2.5)
    later(harness, 1)
    replica = harness.replica(1)
    assert replica.state == "provisioning"
    assert [a.price_usd_h for a in replica.attempts.order_by("number")] == [2.0, 2.5]
    assert price_events(harness)[-1] == (
        "info",
        "2 x local cpu: the price is within the limit, launches resume",
    )
    assert ReplicaPool.objects.get().held == ""
    assert fleet.pool_rows(harness.run)[0]["breaker"]["state"] == "healthy"


def test_launches_resume_when_the_limit_is_raised(harness: Any, prices_file: List) -> None:
    prices_file.cpu(4.0)
    lose(harness, 1)
    later(harness, 10)
    assert replicas_and_pools.limit_price(ReplicaPool.objects.get(), 4.0, actor=harness.run.owner)
    assert price_events(harness)[-1][1] == "2 x local cpu: max price $3 an hour, now $4 an hour"
    later(harness, 1)
    assert harness.replica(1).state == "provisioning"
    assert not replicas_and_pools.limit_price(
        ReplicaPool.objects.get(), 4.0, actor=harness.run.owner
    )


def launch_all(run: Any) -> None:
    for replica in run.replicas.all():
        launch_replica(replica.pk)


def test_first_launch_is_held(
    make_run: MakeRun, prices_file: List, executor: FakeExecutor, clock: Clock, outbox: Any
) -> None:
    run = make_run(pools=(PoolDraft(count=2, max_price_usd_h=3.0),))
    pool = run.pools.get()
    prices_file.cpu(3.5)
    launched(run)
    launch_all(run)
    launch_all(run)
    assert executor.launches == 0
    assert {r.state for r in run.replicas.all()} == {"pending"}
    assert [e.level for e in run.events.filter(kind=prices.KIND).order_by("id")] == [
        "info",
        "warning",
    ]
    clock.pass_s(6)
    reconcile_run(str(run.pk))
    assert {r.state_reason for r in run.replicas.all()} == {
        "not launched: expected a price of at most $3 an hour, found $3.5"
    }
    prices_file.cpu(3.0)
    outbox.clear()
    reconcile_run(str(run.pk))
    assert ("launch_pool", pool.pk) in outbox
    launch_all(run)
    assert executor.launches == 2


def test_pool_with_a_limit_and_an_unknown_price_is_held(harness: Any, prices_file: List) -> None:
    pool = ReplicaPool.objects.get()
    ReplicaPool.objects.update(backend="modal", hardware="a machine of yesterday")
    pool.refresh_from_db()
    assert prices.price_now(pool) is None
    assert not prices.can_launch(pool)
    assert pool.held == "expected a price of at most $3 an hour, found none"
    assert pool.price_usd_h == 2.0  # latest known price
    ReplicaPool.objects.update(max_price_usd_h=None)
    pool.refresh_from_db()
    assert prices.can_launch(pool)


def test_entered_price_is_fixed(make_harness: Callable[..., Any], prices_file: List) -> None:
    harness = make_harness(
        replicas=2, pools=(PoolDraft(count=2, price_usd_h=1.0, max_price_usd_h=3.0),)
    )
    prices_file.cpu(9.0)
    harness.start()
    pool = ReplicaPool.objects.get()
    assert (pool.price_given, pool.price_usd_h, pool.held) == (True, 1.0, "")
    assert clone_of(harness.run).pools[0].price_usd_h == 1.0


def test_clone_gets_the_current_price(harness: Any) -> None:
    assert clone_of(harness.run).pools[0].price_usd_h is None


def test_check_without_a_change_makes_no_query(
    harness: Any, django_assert_num_queries: Any, prices_file: List
) -> None:
    pool = ReplicaPool.objects.get()
    with django_assert_num_queries(0):
        assert prices.can_launch(pool)
    prices_file.cpu(4.0)
    prices.can_launch(pool)
    with django_assert_num_queries(0):
        assert not prices.can_launch(pool)


def test_invalid_price_file_keeps_the_previous_prices(
    prices_file: List, caplog: pytest.LogCaptureFixture
) -> None:
    def cpu() -> float | None:
        result = catalogue().get("local", "cpu")
        assert result is not None
        return result.price_usd_h

    assert cpu() == 2.0
    prices_file.write("[local.cpu]\nprice_usd_h = -1\n")
    assert (cpu(), cpu()) == (2.0, 2.0)
    assert caplog.text.count("the previous prices apply") == 1
    prices_file.cpu(5.0)
    assert cpu() == 5.0


OUT_OF_RANGE = pytest.mark.parametrize("amount", [-1.0, float("nan"), float("inf"), 1e308])


@OUT_OF_RANGE
def test_prices_of_a_draft_are_limited(harness: Any, amount: float) -> None:
    """Two of 1e308 have a sum that PostgreSQL refuses to compute."""
    for name in ("price_usd_h", "max_price_usd_h"):
        pool = dataclasses.replace(PoolDraft(count=1), **{name: amount})
        draft = dataclasses.replace(clone_of(harness.run), pools=(pool,))
        with pytest.raises(InvalidRun, match="expected 0 to 1,000,000 USD per hour"):
            create_run(draft, owner=harness.run.owner, submit_key="a")


@OUT_OF_RANGE
def test_costs_are_limited(harness: Any, amount: float) -> None:
    """A backend reports the billed seconds."""
    now = timezone.now()
    cost = billing.cost_usd(
        price_usd_h=2.0,
        launched_at=now,
        started_at=now,
        ended_at=now,
        now=now,
        billed_s=amount,
    )
    assert cost is not None and 0 <= cost <= MAX_USD


@OUT_OF_RANGE
def test_invalid_limit_is_refused(harness: Any, amount: float) -> None:
    with pytest.raises(InvalidRun, match="expected 0 to 1,000,000 USD"):
        replicas_and_pools.limit_price(ReplicaPool.objects.get(), amount, actor=harness.run.owner)
