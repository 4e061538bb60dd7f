"""Quorums, healing and votes of the Manager: scenarios as text.

``a@3`` is replica a after 3 steps; ``a/1of2@3`` is its second rank of two.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from diloco.protocol.manager_records import Join, Quorum, Vote
from diloco.protocol.manager_rounds import (
    ConfigMismatch,
    counts,
    decide_commit,
    decide_quorum,
    member_view,
    participants,
)
from diloco.protocol.records import Identity

ME = Identity(replica=1, incarnation="00001-00000001")


def number(replica: str, rank: int = 0) -> int:
    return 10 * (ord(replica) - ord("a")) + rank + 1


def join(text: str, **fields: object) -> Join:
    match = re.fullmatch(r"([a-z])(?:/(\d)of(\d))?@(\d+)", text)
    assert match, text
    made = Join(
        member=number(match[1], int(match[2] or 0)),
        incarnation="00001-00000001",
        replica_id=match[1],
        rank=int(match[2] or 0),
        world_size=int(match[3] or 1),
        step=int(match[4]),
        min_replicas=1,
        init_sync=True,
        shrink_only=False,
        allow_heal=True,
        mode="",
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def quorum_of(
    text: str,
    *,
    live: str = "",
    before: str = "",
    waited_s: float = 0.0,
    majority_guard: bool = False,
    replica_of: dict[int, str] | None = None,
    **fields: object,
) -> Quorum | None:
    previous = quorum_of(before, waited_s=99.0) if before else None
    return decide_quorum(
        [join(one, **fields) for one in text.split()],
        n=2,
        me=ME,
        previous=previous,
        live=[number(one) for one in live.split()],
        waited_s=waited_s,
        join_timeout_s=60.0,
        majority_guard=majority_guard,
        replica_of=replica_of,
    )


def shown(quorum: Quorum | None) -> str:
    if quorum is None:
        return "wait"
    seats = [f"{'heal ' if s.heals else ''}{s.replica_id}" for s in quorum.seats if s.rank == 0]
    return f"step {quorum.step}: {', '.join(seats)}"


@pytest.mark.parametrize(
    ("joins", "given", "expected"),
    [
        ("", {}, "wait"),
        ("a@3", {}, "step 3: a"),
        ("a@3", {"min_replicas": 2}, "wait"),
        ("b@3 a@3", {"min_replicas": 2}, "step 3: a, b"),
        # Every live member is waited for, up to the timeout ...
        ("a@3 b@3", {"live": "a b c"}, "wait"),
        ("a@3 b@3", {"live": "a b c", "waited_s": 59.0}, "wait"),
        ("a@3 b@3", {"live": "a b c", "waited_s": 60.0}, "step 3: a, b"),
        ("a@3 b@3 c@0", {"live": "a b c"}, "step 3: a, b, heal c"),
        # ... and a newcomer that is not ready delays no other member.
        ("a@3 b@3", {"live": "a b c", "before": "a@2 b@2"}, "step 3: a, b"),
        ("a@3 c@0", {"live": "a b c", "before": "a@2 b@2"}, "wait"),
        ("a@3 c@0", {"live": "a c", "before": "a@2 b@2"}, "step 3: a, heal c"),
        # At step 0 all but one heal, unless they start with equal weights.
        ("a@0 b@0", {}, "step 0: a, heal b"),
        ("a@0 b@0", {"init_sync": False}, "step 0: a, b"),
        ("a@0 b@2 c@1", {"init_sync": False}, "step 2: heal a, b, heal c"),
        # No newcomers with shrink_only.
        ("a@3 c@0", {"live": "a c", "before": "a@2 b@2", "shrink_only": True}, "step 3: a"),
        ("a@3", {"live": "a c", "before": "a@2 b@2", "shrink_only": True}, "step 3: a"),
        # A replica is present when all its ranks are; its step is the lowest of them.
        ("a/0of2@3 a/1of2@3 b/0of2@3", {}, "step 3: a"),
        ("a/0of2@3 a/1of2@3 b/0of2@3 b/1of2@0", {}, "step 3: a, heal b"),
    ],
)
def test_a_quorum(joins: str, given: dict[str, object], expected: str) -> None:
    assert shown(quorum_of(joins, **given)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("joins", "given", "expected"),
    [
        # More than half of the healthy replicas are required, even after the timeout.
        ("a@3", {"live": "a b"}, "wait"),
        ("a@3", {"live": "a b c"}, "wait"),
        ("a@3 b@3", {"live": "a b c"}, "step 3: a, b"),
        ("a@3 b@3", {"live": "a b c d"}, "wait"),
        ("a@3 b@3 c@0", {"live": "a b c d"}, "step 3: a, b, heal c"),
        # Members with an expired lease do not count, so a group can shrink and start.
        ("a@3", {"live": "a"}, "step 3: a"),
        ("a@3", {}, "step 3: a"),
        # The complete previous quorum continues, as with torchft's lighthouse.
        ("a@3", {"live": "a b c", "before": "a@2"}, "step 3: a"),
        ("a@3", {"live": "a b c", "before": "a@2 b@2"}, "wait"),
        # With shrink_only a joining newcomer counts on both sides, as with torchft's.
        ("a@3 c@0", {"live": "a b c", "before": "a@2 b@2", "shrink_only": True}, "step 3: a"),
        ("a@3", {"live": "a b c", "before": "a@2 b@2", "shrink_only": True}, "wait"),
        # Replicas are counted, not ranks.
        ("a/0of2@3 a/1of2@3 b/0of2@3", {"live": "a b"}, "wait"),
    ],
)
def test_the_majority_guard(joins: str, given: dict[str, object], expected: str) -> None:
    late = {"waited_s": 1e9, "majority_guard": True}
    assert shown(quorum_of(joins, **late, **given)) == expected  # type: ignore[arg-type]
    if expected == "wait":
        assert shown(quorum_of(joins, waited_s=1e9, **given)) != "wait"  # type: ignore[arg-type]


def test_a_restarted_process_is_not_a_member_of_the_previous_quorum() -> None:
    """It has at best a saved state, and a live replica can have a newer one."""
    previous = quorum_of("a@3", waited_s=99.0)
    joins = [join("a@2", incarnation="00002-00000002")]
    given: dict[str, object] = {"n": 3, "me": ME, "previous": previous, "waited_s": 1e9}
    live = {"live": [number("a"), number("b")], "join_timeout_s": 1.0, "majority_guard": True}
    assert decide_quorum(joins, **given, **live) is None  # type: ignore[arg-type]
    assert decide_quorum([join("a@3")], **given, **live) is not None  # type: ignore[arg-type]


def test_ranks_of_one_replica_count_once() -> None:
    """Two live members that have not joined are one replica if they have its name."""
    given = {"live": "a b c", "waited_s": 1e9, "majority_guard": True}
    assert shown(quorum_of("a@3", **given)) == "wait"  # type: ignore[arg-type]
    names = {number("b"): "a", number("c"): "a"}
    assert shown(quorum_of("a@3", replica_of=names, **given)) == "step 3: a"  # type: ignore[arg-type]


def test_the_newest_process_of_a_member_counts() -> None:
    old, new = join("a@3"), join("a@0", incarnation="00002-00000000")
    quorum = decide_quorum(
        [new, old], n=1, me=ME, previous=None, live=[], waited_s=0.0, join_timeout_s=0.0
    )
    assert quorum is not None
    assert [(seat.incarnation, seat.step) for seat in quorum.seats] == [(new.incarnation, 0)]


def test_members_with_different_configurations_form_no_quorum() -> None:
    joins = [join("a@1", mode="x"), join("b@1", mode="y")]
    with pytest.raises(ConfigMismatch, match="same mode of every member, found"):
        decide_quorum(joins, n=1, me=ME, previous=None, live=[], waited_s=0.0, join_timeout_s=0.0)


def place(joins: str, replica: str, **given: object) -> tuple[object, ...]:
    quorum = quorum_of(joins)
    assert quorum is not None
    options: dict[str, object] = {"healed_take_part": False, "heal": True, "at_most": None}
    stand = member_view(quorum, number(replica), **options | given)  # type: ignore[arg-type]
    contributors = "".join(seat.replica_id for seat in stand.contributors)
    return stand.rank, stand.size, stand.newest_rank, stand.newest_size, contributors


def test_a_replica_behind_contributes_after_healing() -> None:
    assert place("a@0 b@2 c@2", "a") == (0, 3, None, 2, "bc")
    assert place("a@0 b@2 c@2", "c") == (2, 3, 1, 2, "bc")
    assert place("a@0 b@2 c@2", "a", healed_take_part=True) == (0, 3, None, 2, "abc")


def test_at_step_0_all_count_but_only_the_source_contributes() -> None:
    assert place("a@0 b@0", "b") == (1, 2, 1, 2, "a")
    assert place("a@0 b@0", "b", heal=False) == (1, 2, 1, 2, "ab")


def test_spares_contribute_nothing() -> None:
    assert place("a@2 b@2 c@2", "c", at_most=2) == (2, 3, 2, 3, "ab")


def decision(joins: str, votes: str, *, gone: str = "", late: bool = False) -> str:
    """Format a commit decision: ``votes``: a for, A against. The result lists the replicas for
    which the step counts, and in brackets the included members; or wait."""
    quorum = quorum_of(joins)
    assert quorum is not None
    needed = participants(quorum, healed_take_part=False)
    made = decide_commit(
        quorum,
        {
            number(one.lower()): Vote(
                member=number(one.lower()), incarnation=ME.incarnation, ok=one.islower()
            )
            for one in votes
        },
        c=0,
        me=ME,
        needed=needed,
        gone=[number(one) for one in gone],
        out_of_time=late,
    )
    if made is None:
        return "wait"
    return "".join(
        seat.replica_id
        for seat in quorum.seats
        if counts(quorum, made, needed=needed, member=seat.member)
    )


@pytest.mark.parametrize(
    ("joins", "votes", "given", "expected"),
    [
        ("a@2 b@2", "ab", {}, "ab"),
        ("a@2 b@2", "a", {}, "wait"),
        ("a@2 b@2", "A", {}, ""),  # decided without b
        ("a@2 b@2", "aB", {}, ""),
        ("a@2 b@2", "a", {"gone": "b"}, ""),  # its tensors were needed
        ("a@2 b@2", "a", {"late": True}, ""),
        # A healing member is not needed: without it the step counts for the others.
        ("a@2 b@2 c@0", "ab", {}, "wait"),
        ("a@2 b@2 c@0", "abC", {}, "ab"),
        ("a@2 b@2 c@0", "abc", {}, "abc"),
        ("a@2 b@2 c@0", "ab", {"gone": "c"}, "ab"),
    ],
)
def test_a_vote(joins: str, votes: str, given: dict[str, object], expected: str) -> None:
    assert decision(joins, votes, **given) == expected  # type: ignore[arg-type]


def test_a_replica_commits_with_all_its_ranks_or_none() -> None:
    quorum = quorum_of("a/0of2@2 a/1of2@2 b/0of2@0 b/1of2@0")
    assert quorum is not None
    needed = participants(quorum, healed_take_part=False)
    votes = {
        seat.member: Vote(
            member=seat.member, incarnation=ME.incarnation, ok=seat.member != number("b", 1)
        )
        for seat in quorum.seats
    }
    made = decide_commit(quorum, votes, c=0, me=ME, needed=needed, gone=[], out_of_time=False)
    assert made is not None
    results = [counts(quorum, made, needed=needed, member=seat.member) for seat in quorum.seats]
    assert results == [True, True, False, False]
