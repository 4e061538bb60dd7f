"""The max price of a pool, at every launch: held, told of once, and taken up again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executors.base import Cause
from runs.actions import replicas_and_pools
from runs.backends import prices
from runs.backends.executors import catalogue
from runs.exceptions import InvalidRun
from runs.models import Event, ReplicaPool
from runs.queries import fleet
from runs.reconcile.launch import launch_replica
from runs.reconcile.reconciler import reconcile_run
from runs.submit.clone_and_fork import clone_of
from runs.submit.run_draft import PoolDraft
from tests.runs.launching import MakeRun, launched
from tests.runs.world import Clock, FakeExecutor

pytestmark = pytest.mark.django_db


class List:
    """The file of prices that an administrator edits."""

    def __init__(self, path: Path) -> None:
        self.path, self.edits = path, 0

    def say(self, text: str) -> None:
        self.path.write_text(text)
        self.edits += 1
        os.utime(self.path, ns=(self.edits * 10**9, self.edits * 10**9))  # each is a later one

    def cpu(self, usd_h: float) -> None:
        self.say(f"[local.cpu]\nprice_usd_h = {usd_h}\n")


@pytest.fixture
def prices_file(tmp_path: Path, settings: Any) -> List:
    settings.HARDWARE_FILE = tmp_path / "hardware.toml"
    made = List(settings.HARDWARE_FILE)
    made.cpu(2.0)
    return made


@pytest.fixture
def world(make_world: Callable[..., Any], prices_file: List) -> Any:
    made = make_world(replicas=2, pools=(PoolDraft(count=2, max_price_usd_h=3.0),))
    made.start()
    return made


def said(world: Any) -> list[tuple[str, str]]:
    found = Event.objects.filter(run=world.run, kind=prices.KIND).order_by("id")
    return [(event.level, event.message) for event in found]


def lose(world: Any, number: int) -> None:
    world.executor.end(world.key(number), Cause.LOST)
    world.beat_all(but=(number,))
    world.tick()


def later(world: Any, *seconds: float) -> None:
    for after_s in seconds:
        world.beat_all(but=(1,))
        world.tick(after_s)
        world.work()


def test_a_price_that_rose_holds_the_relaunch_and_is_told_once(
    world: Any, prices_file: List
) -> None:
    prices_file.cpu(4.0)
    lose(world, 1)
    later(world, 10, 1, 1, 1)
    replica = world.replica(1)
    assert (replica.state, replica.attempts.count()) == ("restarting", 1)
    words = "expected a price of at most $3 an hour, now $4"
    assert replica.state_reason == f"not launched: {words}"
    assert said(world) == [
        ("info", "2 x local cpu: $4 an hour, which was $2"),
        ("warning", f"2 x local cpu: nothing is launched: {words}"),
    ]
    [row] = fleet.pool_rows(world.run)
    assert (row["breaker"]["state"], row["breaker"]["trouble"]) == ("price", words)
    assert "raises the limit" in row["breaker"]["advice"]
    assert (row["price_usd_h"], row["max_price_usd_h"]) == (4.0, 3.0)
    assert world.replica(0).state == "computing"  # what runs is not ended


def test_it_is_launched_when_the_price_falls_and_costs_what_it_costs_then(
    world: Any, prices_file: List
) -> None:
    prices_file.cpu(4.0)
    lose(world, 1)
    later(world, 10)
    prices_file.cpu(2.5)
    later(world, 1)
    replica = world.replica(1)
    assert replica.state == "provisioning"
    assert [a.price_usd_h for a in replica.attempts.order_by("number")] == [2.0, 2.5]
    assert said(world)[-1] == (
        "info",
        "2 x local cpu: its price is within the limit, launches go on",
    )
    assert ReplicaPool.objects.get().held == ""
    assert fleet.pool_rows(world.run)[0]["breaker"]["state"] == "ok"


def test_it_is_launched_when_somebody_raises_the_limit(world: Any, prices_file: List) -> None:
    prices_file.cpu(4.0)
    lose(world, 1)
    later(world, 10)
    assert replicas_and_pools.limit_price(ReplicaPool.objects.get(), 4.0, actor=world.run.owner)
    assert said(world)[-1][1] == "2 x local cpu: max price $3 an hour, now $4 an hour"
    later(world, 1)
    assert world.replica(1).state == "provisioning"
    assert not replicas_and_pools.limit_price(ReplicaPool.objects.get(), 4.0, actor=world.run.owner)


def launch_all(run: Any) -> None:
    for replica in run.replicas.all():
        launch_replica(replica.pk)


def test_the_first_launch_is_held_too(
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
        "info", "warning",
    ]  # fmt: skip
    clock.pass_s(6)
    reconcile_run(str(run.pk))
    assert {r.state_reason for r in run.replicas.all()} == {
        "not launched: expected a price of at most $3 an hour, now $3.5"
    }
    prices_file.cpu(3.0)
    outbox.clear()
    reconcile_run(str(run.pk))
    assert ("launch_pool", pool.pk) in outbox
    launch_all(run)
    assert executor.launches == 2


def test_a_price_that_nobody_knows_any_more_is_held_under_a_limit(
    world: Any, prices_file: List
) -> None:
    pool = ReplicaPool.objects.get()
    ReplicaPool.objects.update(backend="modal", hardware="a machine of yesterday")
    pool.refresh_from_db()
    assert prices.price_now(pool) is None
    assert not prices.may_launch(pool)
    assert pool.held == "expected a price of at most $3 an hour, which nobody knows now"
    assert pool.price_usd_h == 2.0  # as known last
    ReplicaPool.objects.update(max_price_usd_h=None)
    pool.refresh_from_db()
    assert prices.may_launch(pool)


def test_a_price_that_somebody_typed_is_theirs(
    make_world: Callable[..., Any], prices_file: List
) -> None:
    world = make_world(
        replicas=2, pools=(PoolDraft(count=2, price_usd_h=1.0, max_price_usd_h=3.0),)
    )
    prices_file.cpu(9.0)
    world.start()
    pool = ReplicaPool.objects.get()
    assert (pool.price_given, pool.price_usd_h, pool.held) == (True, 1.0, "")
    assert clone_of(world.run).pools[0].price_usd_h == 1.0


def test_a_clone_takes_the_price_of_its_own_day(world: Any) -> None:
    assert clone_of(world.run).pools[0].price_usd_h is None


def test_looking_again_costs_no_query(
    world: Any, django_assert_num_queries: Any, prices_file: List
) -> None:
    pool = ReplicaPool.objects.get()
    with django_assert_num_queries(0):
        assert prices.may_launch(pool)
    prices_file.cpu(4.0)
    prices.may_launch(pool)
    with django_assert_num_queries(0):
        assert not prices.may_launch(pool)


def test_a_list_that_became_nonsense_changes_nothing(
    prices_file: List, caplog: pytest.LogCaptureFixture
) -> None:
    def cpu() -> float | None:
        found = catalogue().get("local", "cpu")
        assert found is not None
        return found.price_usd_h

    assert cpu() == 2.0
    prices_file.say("[local.cpu]\nprice_usd_h = -1\n")
    assert (cpu(), cpu()) == (2.0, 2.0)
    assert caplog.text.count("the prices read before hold") == 1
    prices_file.cpu(5.0)
    assert cpu() == 5.0


@pytest.mark.parametrize("limit", [-1.0, float("nan"), float("inf")])
def test_a_limit_is_a_number_of_dollars(world: Any, limit: float) -> None:
    with pytest.raises(InvalidRun, match="expected 0 or more USD"):
        replicas_and_pools.limit_price(ReplicaPool.objects.get(), limit, actor=world.run.owner)
