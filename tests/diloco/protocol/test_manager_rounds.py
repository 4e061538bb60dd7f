"""Who is in a quorum of the Manager, who heals, and what a vote comes to: scenarios as text.

``a@3`` is replica a, which has done 3 steps; ``a/1of2@3`` its second rank of two.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from diloco.protocol.manager_records import Join, Quorum, Vote
from diloco.protocol.manager_rounds import (
    Disagreement,
    counts,
    decide_quorum,
    decide_verdict,
    participants,
    standing,
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
        # Everyone who lives is waited for, but not for ever ...
        ("a@3 b@3", {"live": "a b c"}, "wait"),
        ("a@3 b@3", {"live": "a b c", "waited_s": 59.0}, "wait"),
        ("a@3 b@3", {"live": "a b c", "waited_s": 60.0}, "step 3: a, b"),
        ("a@3 b@3 c@0", {"live": "a b c"}, "step 3: a, b, heal c"),
        # ... and a newcomer that is not ready holds nobody up.
        ("a@3 b@3", {"live": "a b c", "before": "a@2 b@2"}, "step 3: a, b"),
        ("a@3 c@0", {"live": "a b c", "before": "a@2 b@2"}, "wait"),
        ("a@3 c@0", {"live": "a c", "before": "a@2 b@2"}, "step 3: a, heal c"),
        # At step 0 all but one heal, unless they begin alike.
        ("a@0 b@0", {}, "step 0: a, heal b"),
        ("a@0 b@0", {"init_sync": False}, "step 0: a, b"),
        ("a@0 b@2 c@1", {"init_sync": False}, "step 2: heal a, b, heal c"),
        # Nobody new when shrinking.
        ("a@3 c@0", {"live": "a c", "before": "a@2 b@2", "shrink_only": True}, "step 3: a"),
        ("a@3", {"live": "a c", "before": "a@2 b@2", "shrink_only": True}, "step 3: a"),
        # A replica is there when all its ranks are, and as far as the last of them.
        ("a/0of2@3 a/1of2@3 b/0of2@3", {}, "step 3: a"),
        ("a/0of2@3 a/1of2@3 b/0of2@3 b/1of2@0", {}, "step 3: a, heal b"),
    ],
)
def test_a_quorum(joins: str, given: dict[str, object], expected: str) -> None:
    assert shown(quorum_of(joins, **given)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("joins", "given", "expected"),
    [
        # More than half of the healthy replicas, however long the others are waited for.
        ("a@3", {"live": "a b"}, "wait"),
        ("a@3", {"live": "a b c"}, "wait"),
        ("a@3 b@3", {"live": "a b c"}, "step 3: a, b"),
        ("a@3 b@3", {"live": "a b c d"}, "wait"),
        ("a@3 b@3 c@0", {"live": "a b c d"}, "step 3: a, b, heal c"),
        # Those whose lease has run out do not count, so a group can shrink and can start.
        ("a@3", {"live": "a"}, "step 3: a"),
        ("a@3", {}, "step 3: a"),
        # Everybody of the quorum before goes on, as with torchft's lighthouse.
        ("a@3", {"live": "a b c", "before": "a@2"}, "step 3: a"),
        ("a@3", {"live": "a b c", "before": "a@2 b@2"}, "wait"),
        # When shrinking, a newcomer that asks is counted on both sides, as with torchft's.
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


def test_a_process_started_again_is_not_the_one_of_the_quorum_before() -> None:
    """It has a saved state at best, and a replica that lives may have a newer one."""
    previous = quorum_of("a@3", waited_s=99.0)
    joins = [join("a@2", incarnation="00002-00000002")]
    given: dict[str, object] = {"n": 3, "me": ME, "previous": previous, "waited_s": 1e9}
    live = {"live": [number("a"), number("b")], "join_timeout_s": 1.0, "majority_guard": True}
    assert decide_quorum(joins, **given, **live) is None  # type: ignore[arg-type]
    assert decide_quorum([join("a@3")], **given, **live) is not None  # type: ignore[arg-type]


def test_ranks_of_one_replica_count_once() -> None:
    """Two members that live and have not asked are one replica where their names say so."""
    given = {"live": "a b c", "waited_s": 1e9, "majority_guard": True}
    assert shown(quorum_of("a@3", **given)) == "wait"  # type: ignore[arg-type]
    names = {number("b"): "a", number("c"): "a"}
    assert shown(quorum_of("a@3", replica_of=names, **given)) == "step 3: a"  # type: ignore[arg-type]


def test_of_a_members_processes_the_newest_counts() -> None:
    old, new = join("a@3"), join("a@0", incarnation="00002-00000000")
    quorum = decide_quorum(
        [new, old], n=1, me=ME, previous=None, live=[], waited_s=0.0, join_timeout_s=0.0
    )
    assert quorum is not None
    assert [(seat.incarnation, seat.step) for seat in quorum.seats] == [(new.incarnation, 0)]


def test_members_set_up_differently_make_no_quorum() -> None:
    joins = [join("a@1", mode="x"), join("b@1", mode="y")]
    with pytest.raises(Disagreement, match="same mode of every member, found"):
        decide_quorum(
            joins, n=1, me=ME, previous=None, live=[], waited_s=0.0, join_timeout_s=0.0
        )  # fmt: skip


def place(joins: str, replica: str, **given: object) -> tuple[object, ...]:
    quorum = quorum_of(joins)
    assert quorum is not None
    options: dict[str, object] = {"healed_take_part": False, "heal": True, "at_most": None}
    stand = standing(quorum, number(replica), **options | given)  # type: ignore[arg-type]
    contributors = "".join(seat.replica_id for seat in stand.contributors)
    return stand.rank, stand.size, stand.newest_rank, stand.newest_size, contributors


def test_who_is_behind_contributes_once_it_has_healed() -> None:
    assert place("a@0 b@2 c@2", "a") == (0, 3, None, 2, "bc")
    assert place("a@0 b@2 c@2", "c") == (2, 3, 1, 2, "bc")
    assert place("a@0 b@2 c@2", "a", healed_take_part=True) == (0, 3, None, 2, "abc")


def test_at_the_first_step_all_count_but_only_the_source_gives() -> None:
    assert place("a@0 b@0", "b") == (1, 2, 1, 2, "a")
    assert place("a@0 b@0", "b", heal=False) == (1, 2, 1, 2, "ab")


def test_spares_contribute_nothing() -> None:
    assert place("a@2 b@2 c@2", "c", at_most=2) == (2, 3, 2, 3, "ab")


def verdict(joins: str, votes: str, *, gone: str = "", late: bool = False) -> str:
    """``votes``: a for, A against. The replicas for which the step counts, in brackets the members
    that are in; or wait."""
    quorum = quorum_of(joins)
    assert quorum is not None
    needed = participants(quorum, healed_take_part=False)
    made = decide_verdict(
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
        ("a@2 b@2", "A", {}, ""),  # settled: nobody need wait for b
        ("a@2 b@2", "aB", {}, ""),
        ("a@2 b@2", "a", {"gone": "b"}, ""),  # its tensors were counted on
        ("a@2 b@2", "a", {"late": True}, ""),
        # One that heals is not counted on: without it the step counts for the others.
        ("a@2 b@2 c@0", "ab", {}, "wait"),
        ("a@2 b@2 c@0", "abC", {}, "ab"),
        ("a@2 b@2 c@0", "abc", {}, "abc"),
        ("a@2 b@2 c@0", "ab", {"gone": "c"}, "ab"),
    ],
)
def test_a_vote(joins: str, votes: str, given: dict[str, object], expected: str) -> None:
    assert verdict(joins, votes, **given) == expected  # type: ignore[arg-type]


def test_a_replica_commits_with_all_its_ranks_or_not_at_all() -> None:
    quorum = quorum_of("a/0of2@2 a/1of2@2 b/0of2@0 b/1of2@0")
    assert quorum is not None
    needed = participants(quorum, healed_take_part=False)
    votes = {
        seat.member: Vote(
            member=seat.member, incarnation=ME.incarnation, ok=seat.member != number("b", 1)
        )
        for seat in quorum.seats
    }
    made = decide_verdict(quorum, votes, c=0, me=ME, needed=needed, gone=[], out_of_time=False)
    assert made is not None
    results = [counts(quorum, made, needed=needed, member=seat.member) for seat in quorum.seats]
    assert results == [True, True, False, False]
