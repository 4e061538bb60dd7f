"""Pools that grow and shrink while the run works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from executors.base import Cause
from runs.actions import replicas_and_pools
from runs.exceptions import InvalidRun
from runs.models import Credential
from runs.submit.run_draft import PoolDraft

pytestmark = pytest.mark.django_db
MakeWorld = Callable[..., Any]


@pytest.fixture
def world(make_world: MakeWorld) -> Any:
    made = make_world(replicas=3, max_replicas=5, min_quorum=2)
    made.start()
    return made


def scale(world: Any, count: int) -> int:
    pool = world.run.pools.get()
    return replicas_and_pools.scale_pool(pool, count, actor=world.run.owner)


def states(world: Any) -> list[str]:
    return list(world.run.replicas.order_by("number").values_list("state", flat=True))


def test_more_replicas_get_new_numbers_and_are_launched(world: Any) -> None:
    assert scale(world, 5) == 2
    assert states(world) == ["computing"] * 3 + ["pending"] * 2
    world.beat_all(but=(3, 4))
    world.tick(6)
    world.work()
    world.beat_all()
    run = world.tick()
    assert (run.state, run.state_reason) == ("running", "5 of 5 replicas live")
    assert world.events("scaled") == ["local cpu: 3 to 5"]


def test_fewer_replicas_leave_politely_the_youngest_first(world: Any) -> None:
    assert scale(world, 2) == -1
    assert states(world) == ["computing", "computing", "draining"]
    assert world.executor.cancelled == []
    world.executor.end(world.key(2), Cause.ERROR, code=143)
    world.beat_all(but=(2,))
    run = world.tick()
    assert states(world)[2] == "evicted"
    assert (run.state, run.state_reason) == ("running", "2 of 2 replicas live")


def test_who_does_not_work_leaves_first(world: Any) -> None:
    world.executor.end(world.key(0), Cause.LOST)
    world.tick()
    assert states(world)[0] == "restarting"
    scale(world, 2)
    assert states(world) == ["evicted", "computing", "computing"]


def test_an_identity_that_left_is_taken_up_again_before_a_new_one_is_made(world: Any) -> None:
    scale(world, 2)
    world.executor.end(world.key(2), Cause.DONE, code=0)
    world.beat_all(but=(2,))
    world.tick()
    assert scale(world, 4) == 2
    assert states(world) == ["computing", "computing", "restarting", "pending"]


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (6, "at most 5 replicas over the run's life (max_replicas), found 6"),
        (1, "at least the quorum of 2 replicas in all, found 1"),
        (-1, "0 to 1024 replicas, found -1"),
    ],
)
def test_what_cannot_be_is_refused_whole(world: Any, count: int, said: str) -> None:
    before = states(world)
    with pytest.raises(InvalidRun) as caught:
        scale(world, count)
    assert said in caught.value.message
    assert states(world) == before
    assert world.run.pools.get().count == 3
    assert world.events("scaled") == []


def test_scaling_to_what_it_is_changes_nothing(world: Any) -> None:
    assert scale(world, 3) == 0
    assert world.events("scaled") == []


def test_a_run_that_is_over_does_not_scale(world: Any) -> None:
    world.run.__class__.objects.filter(pk=world.run.pk).update(state="failed")
    with pytest.raises(InvalidRun, match="found one failed"):
        scale(world, 4)


def test_a_pool_is_added(world: Any) -> None:
    draft = PoolDraft(backend="local", hardware="gpu", count=2)
    pool = replicas_and_pools.add_pool(world.run, draft, actor=world.run.owner)
    assert list(pool.replicas.values_list("number", flat=True)) == [3, 4]
    assert world.run.pools.count() == 2
    with pytest.raises(InvalidRun, match="max_replicas"):
        replicas_and_pools.add_pool(world.run, draft, actor=world.run.owner)
    assert world.run.pools.count() == 2


@pytest.mark.parametrize(
    ("draft", "field", "said"),
    [
        (PoolDraft(hardware="gpu9"), "pools.0.hardware", "found 'gpu9'"),
        (PoolDraft(credential=77), "pools.0.credential", "found none of number 77"),
        (PoolDraft(price_usd_h=float("nan")), "pools.0.price_usd_h", "found nan"),
    ],
)
def test_a_pool_is_checked(world: Any, draft: PoolDraft, field: str, said: str) -> None:
    assert not Credential.objects.exists()
    with pytest.raises(InvalidRun) as caught:
        replicas_and_pools.add_pool(world.run, draft, actor=world.run.owner)
    assert caught.value.field == field
    assert said in caught.value.message
