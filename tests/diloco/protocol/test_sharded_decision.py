"""The decision core in sharded and syncer rounds."""

from __future__ import annotations

import dataclasses

import pytest

from diloco.protocol.records import Plan
from diloco.protocol.round_decision import shards_of
from diloco.protocol.round_view import (
    ListShards,
    MakeCommit,
    Merge,
    Reduce,
    Wait,
)
from tests.diloco.protocol.decision_harness import SETTINGS, Watch, contribution, planned, view


def sharded(**changes: object) -> tuple[Plan, dict[str, object]]:
    settings = dataclasses.replace(SETTINGS, reduce_plan="sharded")
    seen = view(0, contribution(0), contribution(1), contribution(2), settings=settings)
    return planned(dataclasses.replace(seen, **changes)), {"settings": settings}  # type: ignore[arg-type]


def test_in_a_sharded_round_each_contributor_owns_a_shard() -> None:
    plan, _ = sharded()
    assert (plan.mode, plan.owners) == ("sharded", (0, 1, 2))


def test_an_owner_of_a_large_shard_gets_two_and_reduces_the_first_one_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diloco.protocol.reduce_cost.LARGE_SHARD_PARTS", 1)
    plan, same = sharded()
    assert plan.owners == (0, 1, 2, 0, 1, 2)
    assert shards_of(plan, 1) == [1, 4]
    watch = Watch()
    assert watch.at(0, view(1, plan=plan, **same)) == Reduce(plan, 1)
    assert watch.at(0, view(1, plan=plan, merges={1: Merge(digest="a")}, **same)) == Reduce(plan, 4)


def test_a_single_contributor_always_gathers() -> None:
    settings = dataclasses.replace(SETTINGS, reduce_plan="sharded", min_quorum=1)
    plan = planned(view(0, contribution(0), expected="0", settings=settings))
    assert (plan.mode, plan.owners) == ("gather", ())


def test_an_owner_reduces_its_shard_then_lists_the_others() -> None:
    plan, same = sharded()
    watch = Watch()
    assert watch.at(0, view(0, plan=plan, **same)) == Reduce(plan, 0)
    own = {0: Merge(digest="a")}
    assert watch.at(0, view(0, plan=plan, merges=own, **same)) == ListShards(plan)
    action = watch.at(0, view(0, plan=plan, merges=own, reduced={0: ("a",), 1: ("b",)}, **same))
    assert action == Wait(15.0, "waiting for shard 2 of replica 2")
    full = {0: ("a",), 1: ("b",), 2: ("c",)}
    commit = watch.at(1, view(0, plan=plan, merges=own, reduced=full, **same))
    assert isinstance(commit, MakeCommit)
    assert (commit.commit.shards, commit.commit.merged_digest) == (("a", "b", "c"), "")


def test_another_replica_reduces_the_shard_of_a_dead_owner() -> None:
    plan, same = sharded()
    own = {0: Merge(digest="a")}
    seen = view(0, plan=plan, expected="01", merges=own, reduced={1: ("b",)}, **same)
    assert Watch().at(0, seen) == Reduce(plan, 2)
    done = view(
        0,
        plan=plan,
        expected="01",
        merges={**own, 2: Merge(digest="c")},
        reduced={1: ("b",)},
        **same,
    )
    action = Watch().at(0, done)
    assert isinstance(action, MakeCommit)
    assert action.commit.shards == ("a", "b", "c")


def test_a_live_owner_that_does_not_deliver_is_replaced_after_the_timeout() -> None:
    plan, same = sharded()
    watch = Watch()
    seen = view(0, plan=plan, merges={0: Merge(digest="a")}, reduced={1: ("b",)}, **same)
    assert isinstance(watch.at(0, seen), Wait)
    assert watch.at(15, seen) == Reduce(plan, 2)


def test_the_committers_own_reduction_decides_between_two_shard_versions() -> None:
    plan, same = sharded()
    lies = {0: ("a",), 1: ("b", "x"), 2: ("c",)}
    watch = Watch()
    seen = view(0, plan=plan, merges={0: Merge(digest="a")}, reduced=lies, **same)
    assert watch.at(0, seen) == Reduce(plan, 1)
    own = {0: Merge(digest="a"), 1: Merge(digest="b")}
    action = watch.at(0, dataclasses.replace(seen, merges=own))
    assert isinstance(action, MakeCommit)
    assert action.commit.shards == ("a", "b", "c")


def test_a_replica_without_a_shard_reduces_nothing() -> None:
    plan, same = sharded()
    late = view(7, plan=plan, **same)
    assert Watch().at(0, late) == Wait(3, "waiting for another replica to commit")


def test_an_unreadable_slice_voids_a_sharded_round() -> None:
    plan, same = sharded()
    bad = {0: Merge(failure="crc", failed_replica=2)}
    action = Watch().at(0, view(0, plan=plan, merges=bad, **same))
    assert isinstance(action, MakeCommit)
    assert (action.commit.void, action.commit.void_replica, action.commit.shards) == ("crc", 2, ())


def test_a_live_syncer_reduces_everything() -> None:
    settings = dataclasses.replace(SETTINGS, reduce_plan="syncer")
    seen = view(0, contribution(0), contribution(1), expected="01", settings=settings)
    plan = planned(dataclasses.replace(seen, syncers=frozenset({9})))
    assert (plan.mode, plan.owners) == ("syncer", (9,))
    alone = view(9, plan=plan, expected="019", settings=settings)
    assert Watch().at(0, alone) == Reduce(plan, 0)
    follower = view(0, plan=plan, expected="019", settings=settings)
    assert Watch().at(0, follower) == Wait(1, "waiting for another replica to commit")


def test_without_a_live_syncer_the_replicas_reduce() -> None:
    settings = dataclasses.replace(SETTINGS, reduce_plan="syncer")
    plan = planned(view(0, contribution(0), contribution(1), expected="01", settings=settings))
    assert plan.mode == "gather"


def test_auto_gathers_small_models_and_shards_large_ones() -> None:
    small = planned(view(0, *map(contribution, range(3))))
    size = {"numel": 10**9, "size_bytes": 256 + 4 * 10**9 + 8 * 954}
    many = [contribution(n, **size) for n in range(8)]
    large = planned(view(0, *many, expected="01234567", numel=10**9))
    assert (small.mode, large.mode) == ("gather", "sharded")
