"""Pools that grow and shrink while the run trains."""

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
MakeHarness = Callable[..., Any]


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=3, max_replicas=5, min_quorum=2)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


def scale(harness: Any, count: int) -> int:
    pool = harness.run.pools.get()
    return replicas_and_pools.scale_pool(pool, count, actor=harness.run.owner)


def states(harness: Any) -> list[str]:
    return list(harness.run.replicas.order_by("number").values_list("state", flat=True))


def test_more_replicas_get_new_numbers_and_are_launched(harness: Any) -> None:
    assert scale(harness, 5) == 2
    assert states(harness) == ["computing"] * 3 + ["pending"] * 2
    harness.beat_all(but=(3, 4))
    harness.tick(6)
    harness.work()
    harness.beat_all()
    run = harness.tick()
    assert (run.state, run.state_reason) == ("running", "5 of 5 replicas live")
    assert harness.events("scaled") == ["local cpu: 3 to 5"]


def test_scaling_down_drains_the_youngest_first(harness: Any) -> None:
    assert scale(harness, 2) == -1
    assert states(harness) == ["computing", "computing", "draining"]
    assert harness.executor.cancelled == []
    harness.executor.end(harness.key(2), Cause.ERROR, code=143)
    harness.beat_all(but=(2,))
    run = harness.tick()
    assert states(harness)[2] == "evicted"
    assert (run.state, run.state_reason) == ("running", "2 of 2 replicas live")


def test_idle_replicas_leave_first(harness: Any) -> None:
    harness.executor.end(harness.key(0), Cause.LOST)
    harness.tick()
    assert states(harness)[0] == "restarting"
    scale(harness, 2)
    assert states(harness) == ["evicted", "computing", "computing"]


def test_an_ended_identity_is_reused_before_a_new_one_is_created(harness: Any) -> None:
    scale(harness, 2)
    harness.executor.end(harness.key(2), Cause.DONE, code=0)
    harness.beat_all(but=(2,))
    harness.tick()
    assert scale(harness, 4) == 2
    assert states(harness) == ["computing", "computing", "restarting", "pending"]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (6, "at most 5 replicas over the run's life (max_replicas), found 6"),
        (1, "at least the quorum of 2 replicas in all, found 1"),
        (-1, "0 to 1024 replicas, found -1"),
    ],
)
def test_an_invalid_size_changes_nothing(harness: Any, count: int, expected: str) -> None:
    before = states(harness)
    with pytest.raises(InvalidRun) as caught:
        scale(harness, count)
    assert expected in caught.value.message
    assert states(harness) == before
    assert harness.run.pools.get().count == 3
    assert harness.events("scaled") == []


def test_scaling_to_the_current_size_changes_nothing(harness: Any) -> None:
    assert scale(harness, 3) == 0
    assert harness.events("scaled") == []


def test_an_ended_run_does_not_scale(harness: Any) -> None:
    harness.run.__class__.objects.filter(pk=harness.run.pk).update(state="failed")
    with pytest.raises(InvalidRun, match="found one failed"):
        scale(harness, 4)


def test_a_pool_is_added(harness: Any) -> None:
    draft = PoolDraft(backend="local", hardware="gpu", count=2)
    pool = replicas_and_pools.add_pool(harness.run, draft, actor=harness.run.owner)
    assert list(pool.replicas.values_list("number", flat=True)) == [3, 4]
    assert harness.run.pools.count() == 2
    with pytest.raises(InvalidRun, match="max_replicas"):
        replicas_and_pools.add_pool(harness.run, draft, actor=harness.run.owner)
    assert harness.run.pools.count() == 2


@pytest.mark.parametrize(
    ("draft", "field", "expected"),
    [
        (PoolDraft(hardware="gpu9"), "pools.0.hardware", "found 'gpu9'"),
        (PoolDraft(credential=77), "pools.0.credential", "found none of number 77"),
        (PoolDraft(price_usd_h=float("nan")), "pools.0.price_usd_h", "found nan"),
    ],
)
def test_a_pool_is_checked(harness: Any, draft: PoolDraft, field: str, expected: str) -> None:
    assert not Credential.objects.exists()
    with pytest.raises(InvalidRun) as caught:
        replicas_and_pools.add_pool(harness.run, draft, actor=harness.run.owner)
    assert caught.value.field == field
    assert expected in caught.value.message
