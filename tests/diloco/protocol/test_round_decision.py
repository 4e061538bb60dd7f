"""The decision core, told as short scenarios: what was seen when, and what follows."""

from __future__ import annotations

import dataclasses

import pytest

from diloco.protocol.records import ContributionRecord, Identity, Plan
from diloco.protocol.round_decision import decide
from diloco.protocol.round_planning import grace_window_s, screen
from diloco.protocol.round_view import (
    Action,
    Look,
    MakeCommit,
    MakePlan,
    Memory,
    Merge,
    Reduce,
    RoundView,
    Totals,
    Wait,
)
from diloco.protocol.settings import GroupSettings

SETTINGS = GroupSettings(num_replicas=3, min_quorum=2, grace_s=60.0, total_rounds=10)


def contribution(replica: int, **changes: object) -> ContributionRecord:
    record = ContributionRecord(
        round=5, fragment=0, base_round=4, base_digest="base", replica=replica,
        incarnation="00001-00000000", model_hash="model", codec="fp32", numel=10, tokens=100,
        new_tokens=100,
        steps=10, loss=2.0, norm=1.0, norms=(1.0,), size_bytes=296, digest=f"digest{replica}",
        checksums="00000000", compute_s=1.0, encode_s=0.0, rounds_here=4, wall_s=0.0,
    )  # fmt: skip
    if "norm" in changes:
        changes.setdefault("norms", (changes["norm"],))
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def view(
    me: int, *records: ContributionRecord, expected: str = "012", **changes: object
) -> RoundView:
    seen = RoundView(
        round=5, fragment=0, me=Identity(replica=me, incarnation="00001-00000000"),
        settings=SETTINGS, model_hash="model", numel=10, tensors=1, base_round=4,
        base_digest="base",
        totals=Totals(committed=4, tokens=4000),
        contributions={record.replica: record for record in records},
        expected=frozenset(map(int, expected)), live=frozenset(map(int, expected)),
    )  # fmt: skip
    return dataclasses.replace(seen, **changes)  # type: ignore[arg-type]


class Watch:
    """An observer: what it decides at each time, remembering as it goes."""

    def __init__(self) -> None:
        self.memory = Memory()

    def at(self, now_s: float, seen: RoundView) -> Action:
        action, self.memory = decide(seen, self.memory, now_s=now_s, wall_s=0.0, stagger_s=1.0)
        return action


def planned(seen: RoundView) -> Plan:
    action = Watch().at(0, seen)
    assert isinstance(action, MakePlan), action
    return action.plan


def test_everybody_is_there_so_the_first_plans_at_once() -> None:
    plan = planned(view(0, contribution(0), contribution(1), contribution(2)))
    assert [c.replica for c in plan.contributions] == [0, 1, 2]
    assert [c.weight for c in plan.contributions] == [1 / 3] * 3


def test_below_quorum_the_round_waits_and_says_for_whom() -> None:
    action = Watch().at(1000, view(0, contribution(0)))
    assert action == Wait(float("inf"), "quorum 1/2, waiting for replicas 1, 2", patient=True)


def test_a_live_straggler_is_waited_for_until_the_grace_is_over() -> None:
    watch = Watch()
    seen = view(0, contribution(0), contribution(1))
    assert watch.at(100, seen) == Wait(160, "waiting for replica 2")
    assert isinstance(watch.at(159, seen), Wait)
    assert isinstance(watch.at(160, seen), MakePlan)


def test_a_dead_straggler_is_not_waited_for() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    assert [c.replica for c in plan.contributions] == [0, 1]


def test_a_dead_writers_durable_contribution_counts() -> None:
    plan = planned(view(0, contribution(0), contribution(1), contribution(2), expected="01"))
    assert [c.replica for c in plan.contributions] == [0, 1, 2]


def test_the_others_take_their_turn_when_the_planner_does_nothing() -> None:
    watch = Watch()
    seen = view(2, contribution(0), contribution(1), contribution(2))
    assert watch.at(10, seen) == Wait(12, "another replica's turn to plan")
    assert isinstance(watch.at(12, seen), MakePlan)


def test_a_straggler_that_arrives_restarts_nobodys_turn_from_zero_quorum() -> None:
    watch = Watch()
    watch.at(0, view(0, contribution(0), contribution(1)))
    action = watch.at(30, view(0, contribution(0), contribution(1), contribution(2)))
    assert isinstance(action, MakePlan)


def test_with_a_plan_the_payloads_are_reduced_first() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    assert Watch().at(0, view(1, plan=plan)) == Reduce(plan, 0)


def test_the_commit_follows_the_merge_in_turns() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    done = view(0, plan=plan, merges={0: Merge(digest="mean")})
    first = Watch().at(0, done)
    assert isinstance(first, MakeCommit)
    assert first.commit.merged_digest == "mean"
    assert first.commit.tokens_total == 4200
    assert first.commit.committed_total == 5
    assert first.commit.loss == pytest.approx(2.0)
    assert not first.commit.last
    watch = Watch()
    second = view(1, plan=plan, merges={0: Merge(digest="mean")})
    assert watch.at(0, second) == Wait(1, "another replica's turn to commit")
    assert isinstance(watch.at(1, second), MakeCommit)


def test_a_payload_that_cannot_be_read_makes_the_round_void() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    action = Watch().at(0, view(0, plan=plan, merges={0: Merge(failure="crc", failed_replica=1)}))
    assert isinstance(action, MakeCommit)
    commit = action.commit
    assert (commit.void, commit.void_replica, commit.merged_digest) == ("crc", 1, "")
    assert (commit.tokens_total, commit.committed_total, commit.last) == (4000, 4, False)


@pytest.mark.parametrize(
    ("settings", "last"),
    [({"total_rounds": 5}, True), ({"total_rounds": 6}, False), ({"max_tokens": 4200}, True),
     ({"max_tokens": 4201}, False)],
)  # fmt: skip
def test_the_last_commit_is_the_one_that_reaches_a_limit(
    settings: dict[str, int], last: bool
) -> None:
    limits = dataclasses.replace(SETTINGS, **settings)
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    seen = view(0, plan=plan, merges={0: Merge(digest="mean")}, settings=limits)
    action = Watch().at(0, seen)
    assert isinstance(action, MakeCommit)
    assert action.commit.last is last


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_hash": "other"}, "expected model model, found other"),
        ({"base_round": 3}, "expected base round 4, found 3"),
        ({"base_digest": "drift"}, "expected digest of the base weights base, found drift"),
        ({"codec": "bf16"}, "expected codec fp32, found bf16"),
        ({"numel": 11}, "expected number of elements 10, found 11"),
        ({"round": 4}, "expected round 5, found 4"),
        ({"norm": float("nan")}, "expected a finite pseudo-gradient, found norm nan"),
        ({"loss": float("inf")}, "found norm 1.0 and loss inf"),
    ],
)
def test_a_foreign_contribution_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    plan = planned(view(0, contribution(0), contribution(1), contribution(2, **changes)))
    assert [c.replica for c in plan.contributions] == [0, 1]
    assert [r.replica for r in plan.refused] == [2]
    assert words in plan.refused[0].reason


def test_the_majoritys_base_is_right_even_against_the_planner() -> None:
    drifted = view(
        0, contribution(0, base_digest="mine"), contribution(1), contribution(2), base_digest="mine"
    )
    accepted, refused = screen(drifted)
    assert [c.replica for c in accepted] == [1, 2]
    assert [r.replica for r in refused] == [0]


def test_a_contribution_without_tokens_counts_for_nothing() -> None:
    seen = view(0, contribution(0), contribution(1, tokens=0), expected="01")
    assert isinstance(Watch().at(0, seen), Wait)


def test_token_weights_follow_tokens_squared_over_steps() -> None:
    settings = dataclasses.replace(SETTINGS, weighting="tokens")
    plan = planned(
        view(0, contribution(0), contribution(1, tokens=200), expected="01", settings=settings)
    )
    assert [c.weight for c in plan.contributions] == [pytest.approx(0.2), pytest.approx(0.8)]


# -- sharded and syncer --------------------------------------------------------------------------


def sharded(**changes: object) -> tuple[Plan, dict[str, object]]:
    settings = dataclasses.replace(SETTINGS, reduce_plan="sharded")
    seen = view(0, contribution(0), contribution(1), contribution(2), settings=settings)
    return planned(dataclasses.replace(seen, **changes)), {"settings": settings}  # type: ignore[arg-type]


def test_in_a_sharded_round_each_contributor_owns_a_shard() -> None:
    plan, _ = sharded()
    assert (plan.mode, plan.owners) == ("sharded", (0, 1, 2))


def test_a_lone_contributor_gathers_whatever_was_asked() -> None:
    settings = dataclasses.replace(SETTINGS, reduce_plan="sharded", min_quorum=1)
    plan = planned(view(0, contribution(0), expected="0", settings=settings))
    assert (plan.mode, plan.owners) == ("gather", ())


def test_an_owner_reduces_its_shard_and_then_looks_for_the_others() -> None:
    plan, same = sharded()
    watch = Watch()
    assert watch.at(0, view(0, plan=plan, **same)) == Reduce(plan, 0)
    mine = {0: Merge(digest="a")}
    assert watch.at(0, view(0, plan=plan, merges=mine, **same)) == Look(plan)
    action = watch.at(0, view(0, plan=plan, merges=mine, reduced={0: ("a",), 1: ("b",)}, **same))
    assert action == Wait(15.0, "waiting for shard 2 of replica 2")
    full = {0: ("a",), 1: ("b",), 2: ("c",)}
    commit = watch.at(1, view(0, plan=plan, merges=mine, reduced=full, **same))
    assert isinstance(commit, MakeCommit)
    assert (commit.commit.shards, commit.commit.merged_digest) == (("a", "b", "c"), "")


def test_a_dead_owners_shard_is_reduced_by_another() -> None:
    plan, same = sharded()
    mine = {0: Merge(digest="a")}
    seen = view(0, plan=plan, expected="01", merges=mine, reduced={1: ("b",)}, **same)
    assert Watch().at(0, seen) == Reduce(plan, 2)
    done = view(0, plan=plan, expected="01", merges={**mine, 2: Merge(digest="c")},
                reduced={1: ("b",)}, **same)  # fmt: skip
    action = Watch().at(0, done)
    assert isinstance(action, MakeCommit)
    assert action.commit.shards == ("a", "b", "c")


def test_an_owner_that_lives_but_does_not_deliver_is_replaced_in_the_end() -> None:
    plan, same = sharded()
    watch = Watch()
    seen = view(0, plan=plan, merges={0: Merge(digest="a")}, reduced={1: ("b",)}, **same)
    assert isinstance(watch.at(0, seen), Wait)
    assert watch.at(15, seen) == Reduce(plan, 2)


def test_of_two_versions_of_a_shard_the_committers_own_reduction_decides() -> None:
    plan, same = sharded()
    lies = {0: ("a",), 1: ("b", "x"), 2: ("c",)}
    watch = Watch()
    seen = view(0, plan=plan, merges={0: Merge(digest="a")}, reduced=lies, **same)
    assert watch.at(0, seen) == Reduce(plan, 1)
    own = {0: Merge(digest="a"), 1: Merge(digest="b")}
    action = watch.at(0, dataclasses.replace(seen, merges=own))
    assert isinstance(action, MakeCommit)
    assert action.commit.shards == ("a", "b", "c")


def test_who_owns_nothing_waits_for_its_turn_and_reduces_nothing() -> None:
    plan, same = sharded()
    late = view(7, plan=plan, **same)
    assert Watch().at(0, late) == Wait(3, "another replica's turn to commit")


def test_a_slice_that_cannot_be_read_voids_a_sharded_round() -> None:
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
    assert Watch().at(0, follower) == Wait(1, "another replica's turn to commit")


def test_without_a_syncer_the_replicas_do_it_themselves() -> None:
    settings = dataclasses.replace(SETTINGS, reduce_plan="syncer")
    plan = planned(view(0, contribution(0), contribution(1), expected="01", settings=settings))
    assert plan.mode == "gather"


def test_auto_gathers_what_is_small_and_shards_what_is_large() -> None:
    small = planned(view(0, *map(contribution, range(3))))
    size = {"numel": 10**9, "size_bytes": 256 + 4 * 10**9, "checksums": "0" * 8 * 954}
    many = [contribution(n, **size) for n in range(8)]
    large = planned(view(0, *many, expected="01234567", numel=10**9))
    assert (small.mode, large.mode) == ("gather", "sharded")


# -- overlap: the commit before, the grace window ------------------------------------------------


def test_no_commit_overtakes_the_one_before() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    seen = view(0, plan=plan, merges={0: Merge(digest="mean")}, totals=None)
    assert Watch().at(9, seen) == Wait(float("inf"), "the commit of round 4")


def test_the_adaptive_window_is_what_overlap_leaves() -> None:
    settings = dataclasses.replace(
        SETTINGS, sync_every=100, overlap_steps=90, grace_gamma=0.5, grace_floor_s=2.0, grace_s=8.0,
        warmup_steps=0,
    )  # fmt: skip
    accepted = [contribution(0), contribution(1)]  # 0.1 s a step: 9 s of overlap

    def window_s(waited_s: float, sync_s: float) -> float:
        seen = view(0, settings=settings, waited_s=waited_s, sync_s=sync_s)
        return grace_window_s(seen, accepted)

    assert window_s(1.0, 2.0) == pytest.approx(3.0)
    assert window_s(5.0, 9.0) == 2.0  # the floor: nobody is starved
    settings = dataclasses.replace(settings, grace_gamma=10.0)
    assert window_s(1.0, 2.0) == 8.0  # the cap


# -- guards --------------------------------------------------------------------------------------


def test_an_outlier_is_refused_only_where_there_are_enough_to_tell() -> None:
    settings = dataclasses.replace(SETTINGS, outlier_z=4.0)
    records = [contribution(n, norm=1.0 + n / 100) for n in range(3)]
    wild = contribution(3, norm=9.0)
    four = view(0, *records, wild, expected="0123", settings=settings)
    accepted, refused = screen(four)
    assert [c.replica for c in accepted] == [0, 1, 2]
    assert "robust deviations above the median" in refused[0].reason
    accepted, refused = screen(view(0, *records[:2], wild, expected="013", settings=settings))
    assert (len(accepted), refused) == (3, [])
    accepted, refused = screen(view(0, *records, wild, expected="0123"))
    assert (len(accepted), refused) == (4, [])  # off by default


def test_a_fresh_replica_is_quarantined_unless_all_are_fresh() -> None:
    settings = dataclasses.replace(SETTINGS, quarantine_rounds=2, min_quorum=1)
    fresh = contribution(2, rounds_here=1)
    accepted, refused = screen(view(0, contribution(0), fresh, settings=settings))
    assert [c.replica for c in accepted] == [0]
    assert (refused[0].kind, refused[0].reason) == ("quarantine", "round 2 of 2 after joining")
    accepted, refused = screen(view(2, fresh, expected="2", settings=settings))
    assert [c.replica for c in accepted] == [2], "everybody else is dead: it goes on alone"
    assert screen(view(2, fresh, expected="02", settings=settings))[0] == []


def test_a_fixed_world_takes_its_number_and_the_rest_are_spares() -> None:
    settings = dataclasses.replace(
        SETTINGS, world_size_mode="fixed_with_spares", num_replicas=2, min_quorum=2
    )
    plan = planned(view(0, *map(contribution, range(3)), settings=settings))
    assert [c.replica for c in plan.contributions] == [0, 1]
    assert [(r.replica, r.kind) for r in plan.refused] == [(2, "spare")]


# -- a store without an atomic create ------------------------------------------------------------


def test_only_the_named_committer_creates() -> None:
    records = [contribution(0), contribution(1)]
    other = view(0, *records, expected="01", committer=1)
    assert Watch().at(99, other) == Wait(float("inf"), "replica 1 is to plan")
    plan = planned(view(1, *records, expected="01", committer=1))
    done = view(0, plan=plan, merges={0: Merge(digest="mean")}, committer=1)
    assert Watch().at(99, done) == Wait(float("inf"), "replica 1 is to commit")
    action = Watch().at(0, dataclasses.replace(done, me=dataclasses.replace(done.me, replica=1)))
    assert isinstance(action, MakeCommit)


def test_who_voided_two_rounds_in_a_row_is_shunned_in_the_next() -> None:
    seen = view(0, contribution(0), contribution(1), contribution(2), shunned=2)
    plan = planned(seen)
    assert [c.replica for c in plan.contributions] == [0, 1]
    assert "could not be read in the last two rounds" in plan.refused[0].reason


def test_below_quorum_is_no_reason_to_give_up() -> None:
    below = Watch().at(0, view(0, contribution(0)))
    assert isinstance(below, Wait) and below.patient
    straggling = Watch().at(0, view(0, contribution(0), contribution(1)))
    assert isinstance(straggling, Wait) and not straggling.patient
