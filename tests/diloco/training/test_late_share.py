"""The progress that a late replica keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from diloco.protocol.records import Identity, LateReplica, Plan, Refusal
from diloco.protocol.round_weights import HUNG_AFTER, STEADY_ROUNDS
from diloco.protocol.settings import GroupSettings
from diloco.training.late_share import ALL, NOTHING, Kept, LateShare
from tests.diloco.exchange.planned import planned

SETTINGS = GroupSettings(late_keep=0.25)
ME = 3
SHARE = Kept(0.25)


def plan(
    *present: int,
    late: Sequence[LateReplica] = (),
    refused: Sequence[int] = (),
    steady_rounds: int = STEADY_ROUNDS,
) -> Plan:
    identities = [Identity(replica=replica, incarnation="00001-00000000") for replica in present]
    return Plan(
        round=1,
        fragment=0,
        mode="gather",
        planner=identities[0],
        contributions=tuple(planned(identity, weight=1 / len(present)) for identity in identities),
        refused=tuple(Refusal(replica=replica, incarnation="", reason="") for replica in refused),
        late=tuple(late),
        steady_rounds=steady_rounds,
        wall_s=0.0,
    )


def late(missed: int, *, away: bool) -> tuple[LateReplica]:
    return (LateReplica(replica=ME, units=1.0, missed=missed, away=away),)


@pytest.fixture
def share() -> LateShare:
    """Of a replica that the last round of four has included."""
    share = LateShare(ME, SETTINGS)
    share.of(plan(0, 1, 2, ME))
    return share


def test_a_late_replica_keeps_the_share_of_the_settings(share: LateShare) -> None:
    for missed in range(1, 4):
        assert share.of(plan(0, 1, 2, late=late(missed, away=False))) == SHARE


def test_a_replica_that_is_away_keeps_all_for_some_rounds(share: LateShare) -> None:
    kept = [share.of(plan(0, 1, 2, late=late(m, away=True))) for m in range(1, HUNG_AFTER + 3)]
    assert kept == [ALL] * HUNG_AFTER + [SHARE] * 2


def test_a_replica_is_away_only_by_the_plan_of_the_round(share: LateShare) -> None:
    assert share.of(plan(0, 1, 2, late=late(1, away=True))) == ALL
    assert share.of(plan(0, 1, late=late(2, away=False))) == SHARE, "others are late too"
    assert share.of(plan(0, 1, late=late(3, away=True))) == ALL
    assert share.of(plan(0, 1, 2, refused=[ME])) == SHARE
    assert share.of(plan(0, 1, 2, late=late(1, away=True))) == ALL
    assert share.of(plan(0, 1, 2, ME)) == SHARE, "its contribution cannot be read here"


@pytest.mark.parametrize("listed", [0, 1, 3])
def test_a_replica_that_is_cut_off_is_away_while_the_others_continue(
    share: LateShare, listed: int
) -> None:
    """It counts as dead after some rounds, in which it was late, or at once."""
    missed = range(1, HUNG_AFTER + 3)
    kept = [share.of(plan(0, 1, 2, late=late(m, away=True) if m <= listed else ())) for m in missed]
    assert kept == [ALL] * HUNG_AFTER + [SHARE] * 2


def test_a_replica_that_was_cut_off_with_others_keeps_the_share(share: LateShare) -> None:
    assert share.of(plan(0, 1)) == SHARE
    assert share.of(plan(0, 1, 2)) == SHARE


def test_replicas_that_join_do_not_replace_those_that_were_cut_off(share: LateShare) -> None:
    assert share.of(plan(0, 1, 4, 5, 6, 7)) == SHARE


def test_the_rounds_of_one_absence_are_counted_together(share: LateShare) -> None:
    """A plan counts those since it listed the replica."""
    kept = [share.of(plan(0, 1, 2)) for _ in range(HUNG_AFTER)]
    kept += [share.of(plan(0, 1, 2, late=late(m, away=True))) for m in range(1, 4)]
    assert kept == [ALL] * HUNG_AFTER + [SHARE] * 3


@pytest.mark.parametrize("changes", [{"num_fragments": 2}, {"outlier_z": 4.0}])
def test_with_fragments_or_an_outlier_limit_the_share_is_kept(changes: dict[str, float]) -> None:
    share = LateShare(ME, dataclasses.replace(SETTINGS, **changes))  # type: ignore[arg-type]
    share.of(plan(0, 1, 2, ME))
    assert share.of(plan(0, 1, 2)) == SHARE


def test_a_replica_that_was_cut_off_from_an_unsteady_group_keeps_the_share(
    share: LateShare,
) -> None:
    kept = [share.of(plan(0, 1, 2, steady_rounds=STEADY_ROUNDS - 1 + n)) for n in range(3)]
    assert kept == [SHARE] * 3
    assert share.of(plan(0, 1, 2, ME)) == SHARE, "its contribution cannot be read here"
    assert share.of(plan(0, 1, 2)) == ALL, "the group is steady now"


def test_without_a_plan_or_before_the_first_contribution_no_replica_is_away(
    share: LateShare,
) -> None:
    assert share.of(None) == SHARE
    assert share.of(plan(0, 1, 2)) == SHARE
    assert LateShare(ME, SETTINGS).of(plan(0, 1, 2)) == SHARE


@pytest.mark.parametrize(
    "changes",
    [
        {"late_keep": 0.0},
        {"world_size_mode": "fixed_with_spares", "num_replicas": 2, "min_quorum": 2},
    ],
)
def test_a_replica_keeps_nothing_if_late_work_is_dropped(changes: dict[str, float]) -> None:
    share = LateShare(ME, dataclasses.replace(SETTINGS, **changes))  # type: ignore[arg-type]
    share.of(plan(0, 1, 2, ME))
    assert share.of(plan(0, 1, 2, late=late(1, away=True))) == NOTHING
