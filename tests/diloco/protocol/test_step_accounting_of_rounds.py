"""Every step counts exactly once, with fragments, overlap, late and void work.

Each inner step lowers each weight of the model by exactly 1, and the outer optimizer adds
contributions unchanged. So the final global weights *are* the number of counted steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.diloco.counting import COUNTING

MakeGroup = Callable[..., Any]


def count(group: Any, replicas: int = 1, **start: Any) -> list[Any]:
    members = [group.start(n, **COUNTING, **start) for n in range(replicas)]
    group.wait()
    group.assert_agreed(*members)
    return members


def settings(**changes: object) -> dict[str, object]:
    return {
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "num_replicas": 1,
        "sync_every": 4,
        "total_rounds": 5,
        **changes,
    }


def test_without_overlap_every_step_counts(tiny_group: MakeGroup) -> None:
    group = tiny_group(**settings())
    (member,) = count(group)
    assert member.weights().tolist() == [-20.0] * 4
    assert group.commits()[-1].tokens_total == 20 * 8


@pytest.mark.parametrize(("alpha", "total"), [(1.0, 20), (0.5, 16), (0.0, 12)])
def test_overlapped_steps_count_with_the_mixing_factor(
    tiny_group: MakeGroup, alpha: float, total: int
) -> None:
    """Two of the four steps of rounds 2 to 5 are made during the exchange of the previous round."""
    group = tiny_group(**settings(overlap_steps=2, mixing_alpha=alpha))
    (member,) = count(group)
    assert member.weights().tolist() == [-float(total)] * 4
    assert group.commits()[-1].tokens_total == 20 * 8, "a token is counted whatever it is worth"


@pytest.mark.parametrize("pattern", ["strided", "sequential", "size"])
def test_fragments_are_exchanged_in_turn(tiny_group: MakeGroup, pattern: str) -> None:
    group = tiny_group(
        **settings(num_fragments=2, total_rounds=6, num_replicas=2, fragment_pattern=pattern)
    )
    members = count(group, 2)
    assert [group.plan(r).fragment for r in range(1, 7)] == [0, 1, 0, 1, 0, 1]
    # A round has two steps; a fragment's contribution covers the steps since its last round.
    steps = [[c.steps for c in group.plan(r).contributions] for r in range(1, 7)]
    assert steps == [[2, 2], [4, 4], [4, 4], [4, 4], [4, 4], [4, 4]]
    ends = members[0].weights().tolist()
    layers = [0, 2] if pattern == "strided" else [0, 1]
    assert ends == [-10.0 if layer in layers else -12.0 for layer in range(4)]
    assert group.commits()[-1].tokens_total == 2 * 12 * 8, "in however many fragments it is"


def test_rounds_in_flight_are_applied_in_order(tiny_group: MakeGroup) -> None:
    group = tiny_group(
        **settings(num_fragments=4, overlap_steps=3, mixing_alpha=1.0, total_rounds=12)
    )
    (member,) = count(group)
    assert [commit.round for commit in group.commits()] == list(range(1, 13))
    # Fragment f is last exchanged in round 9 + f, after so many steps.
    assert member.weights().tolist() == [-9.0, -10.0, -11.0, -12.0]


def late_in_round_one(tiny_group: MakeGroup, **changes: object) -> tuple[Any, list[Any]]:
    """Two replicas; replica 1 contributes to round 1 after it has been committed without it."""
    group = tiny_group(**settings(num_replicas=2, grace_s=0.0, **changes))
    first_commit = threading.Event()

    def watch(member: Any, joined: Any) -> None:
        if member.replica == 0 and joined.round == 2:
            first_commit.set()
        if member.replica == 1 and member.steps == 4:
            assert first_commit.wait(600)

    members = count(group, 2, on_step=watch)
    assert [c.replica for c in group.commits()[0].contributors] == [0]
    return group, members


def counted(group: Any) -> float:
    """Return the weights according to the plans: ``sum of weight * steps``."""
    rounds = range(1, len(group.commits()) + 1)
    return sum(c.weight * c.steps for r in rounds for c in group.plan(r).contributions)


def test_late_work_along_the_mean_of_its_round_is_dropped(tiny_group: MakeGroup) -> None:
    """All steps of this model have the same direction. The model checker has the opposite case,
    in which no replica changes an element that another one changes."""
    group, members = late_in_round_one(tiny_group, late_keep=1.0)
    late = [c for r in range(1, 6) for c in group.plan(r).contributions if c.replica == 1]
    steps = [c.steps for c in late]
    dropped = sum(c.weight * (c.steps - 4) for c in late)
    assert members[0].weights().tolist() == [dropped - counted(group)] * 4
    assert not steps or steps[0] >= 8, "the missed steps are recorded with the next contribution"
    assert sum(steps) <= members[1].steps
    plans = [group.plan(r) for r in range(1, 6)]
    rounds = [c.rounds for plan in plans for c in plan.contributions if c.replica == 1]
    assert [4 * n for n in rounds] == steps, "each round of work has four steps"
    assert [late.replica for late in plans[0].late] == [1]
    assert [c.weight for c in plans[0].contributions] == [0.5], "room for the late replica"


def test_overwritten_work_is_not_counted(tiny_group: MakeGroup) -> None:
    group, members = late_in_round_one(tiny_group, late_keep=0.0)
    assert members[0].weights().tolist() == [-counted(group)] * 4
    steps = [c.steps for r in range(1, 6) for c in group.plan(r).contributions if c.replica == 1]
    assert set(steps) <= {4}, "the missed steps are gone"
    assert [c.weight for c in group.plan(1).contributions] == [1.0], "and have no room"


def test_void_work_is_in_the_next_contribution(tiny_group: MakeGroup) -> None:
    group = tiny_group(**settings(num_replicas=2, overlap_steps=2, mixing_alpha=1.0))
    members = count(group, 2, spoil=("rounds/00000002/contributions/00001.*.bin", "missing"))
    commits = group.commits()
    assert commits[1].void_replica == 1
    steps = [[c.steps for c in group.plan(r).contributions] for r in range(1, 7)]
    assert steps == [[4, 4], [4, 4], [8, 8], [4, 4], [4, 4], [4, 4]]
    assert members[0].weights().tolist() == [-24.0] * 4
    assert commits[-1].tokens_total == 2 * 24 * 8


def test_late_work_is_not_counted_in_a_group_with_spares(tiny_group: MakeGroup) -> None:
    """Replica 2 contributes to round 1 after its plan, and takes the place of replica 1 in
    round 2."""
    group = tiny_group(
        **settings(num_replicas=2, min_quorum=2, grace_s=0.0, world_size_mode="fixed_with_spares")
    )
    rounds = {2: threading.Event(), 3: threading.Event()}

    def watch(member: Any, joined: Any) -> None:
        if member.replica == 0 and joined.round in rounds:
            rounds[joined.round].set()
        if member.replica == 2 and member.steps == 4:
            assert rounds[2].wait(600)
        if member.replica == 1 and member.steps == 8:
            assert rounds[3].wait(600)

    members = count(group, 3, on_step=watch)
    assert [c.replica for c in group.plan(2).contributions] == [0, 2]
    steps = {c.steps for r in range(1, 6) for c in group.plan(r).contributions}
    assert steps == {4}
    assert members[2].weights().tolist() == [-20.0] * 4


def test_the_work_of_a_spare_is_not_counted(tiny_group: MakeGroup) -> None:
    group = tiny_group(
        **settings(num_replicas=2, min_quorum=2, world_size_mode="fixed_with_spares")
    )
    members = count(group, 3)
    assert all(
        [c.replica for c in group.plan(r).contributions] in ([0, 1], [0, 2], [1, 2])
        for r in range(1, 6)
    )
    assert members[2].weights().tolist() == [-20.0] * 4
