"""What a round of the torchft-shaped Manager decides: pure functions of records and of time waited.

A quorum is made when every live member has asked for it; when everybody of the quorum before has,
so that a newcomer that is not ready holds nobody up; or when the others have waited long enough. A
replica group counts when all its ranks are there. The replicas with the newest step *participate*;
the others heal: they take the first participant's state. At step 0, unless told that all begin
with equal weights, all but the first participant heal. :mod:`~diloco.protocol.manager_branches`
decides which state is the newest.

The majority guard, torchft's rule: unless every process of the quorum before is there, more than
half of the healthy replicas have to be in a quorum. And beyond torchft: no quorum starts from an
older state while a process that holds the newest committed one lives and has not asked.

A commit is made when everybody of the quorum has voted, or is gone, or it has taken too long; a
participant's vote against settles it at once. The step counts only if all who participate, of all
ranks, are in: what was divided by their number must have been summed over all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from diloco.protocol.manager_branches import (
    UNKNOWN,
    Line,
    StateId,
    continues,
    starting_state,
    state_of,
)
from diloco.protocol.manager_records import Join, Quorum, Seat, Verdict, Vote
from diloco.protocol.records import Identity


class Disagreement(ValueError):
    """Members were set up differently; no quorum of theirs would mean the same to all."""


def newest_joins(joins: Iterable[Join]) -> dict[int, Join]:
    """By member, the join of its newest process."""
    newest: dict[int, Join] = {}
    for join in joins:
        if join.member not in newest or join.incarnation > newest[join.member].incarnation:
            newest[join.member] = join
    return newest


def whole_replicas(joins: Iterable[Join]) -> dict[str, tuple[Join, ...]]:
    """The replica groups all ranks of which are there, in the order of their names."""
    groups: dict[str, list[Join]] = {}
    for join in sorted(joins, key=lambda join: (join.replica_id, join.rank)):
        groups.setdefault(join.replica_id, []).append(join)
    return {
        name: tuple(group)
        for name, group in groups.items()
        if [join.rank for join in group] == list(range(group[0].world_size))
    }


def decide_quorum(
    joins: Iterable[Join],
    *,
    n: int,
    me: Identity,
    previous: Quorum | None,
    live: Collection[int],
    waited_s: float,
    join_timeout_s: float,
    replica_of: Mapping[int, str] | None = None,
    majority_guard: bool = False,
    line: Line | None = None,
    holders: Collection[Identity] = (),
) -> Quorum | None:
    """The quorum to propose, or None to go on waiting. ``joins`` are of processes not known to be
    gone, ``live`` the members whose lease is; ``waited_s`` since there were enough replicas.
    ``replica_of`` names the replica of a live member that has not joined; one that it lacks counts
    as a replica of its own. ``line`` is what this round continues, and ``holders`` the live
    processes that have the newest state of it; without a line the highest step is the newest.

    Raises :class:`Disagreement`, :class:`~diloco.protocol.manager_branches.AbandonedBranch`.
    """
    newest = newest_joins(joins)
    for what in ("mode", "allow_heal"):
        found = {str(getattr(join, what)) for join in newest.values()}
        if len(found) > 1:
            raise Disagreement(f"expected the same {what} of every member, found {sorted(found)}")
    joined = replicas = whole_replicas(newest.values())
    former = {seat.replica_id for seat in previous.seats} if previous else set()
    shrinking = previous is not None and any(join.shrink_only for join in newest.values())
    if shrinking:
        replicas = {name: group for name, group in replicas.items() if name in former}
    present = [join for group in replicas.values() for join in group]
    if not present or len(replicas) < max(join.min_replicas for join in present):
        return None
    there = {join.member for join in present}
    before = {seat.member for seat in previous.seats} if previous else set()
    awaited = set(live) & before if shrinking else set(live)
    if not (bool(before) and before <= there) and awaited - there and waited_s < join_timeout_s:
        return None
    goes_on = previous is not None and _processes(previous.seats) <= _processes(present)
    if majority_guard and not goes_on and not is_majority(joined, newest, live, replica_of or {}):
        return None
    if majority_guard and _newest_is_elsewhere(present, line, holders):
        return None
    line_or_none, line = line, line or Line()
    states = {name: state_of(group, line) for name, group in replicas.items()}
    if line_or_none is None:
        states = {name: StateId(UNKNOWN, 0, state.step) for name, state in states.items()}
    start = starting_state(states, line)
    if previous is not None and not continues(line, start):
        line = line.forked_from(start, n)
    first = next(name for name in replicas if states[name] == start)
    sync = start.step == 0 and any(join.init_sync for join in present)
    return Quorum(
        n=n,
        step=start.step,
        mode=present[0].mode,
        seats=tuple(
            Seat(
                member=join.member,
                incarnation=join.incarnation,
                replica_id=join.replica_id,
                rank=join.rank,
                step=states[join.replica_id].step,
                heals=states[join.replica_id] != start or (sync and join.replica_id != first),
                newest=states[join.replica_id] == start,
            )
            for join in present
        ),
        writer=me,
        branch=line.branch,
        head=line.head,
        line=line.past,
    )


def _processes(records: Iterable[Join | Seat]) -> set[tuple[int, str]]:
    return {(record.member, record.incarnation) for record in records}


def is_majority(
    joined: Collection[str],
    newest: Mapping[int, Join],
    live: Collection[int],
    replica_of: Mapping[int, str],
) -> bool:
    """Whether the replicas that ``joined`` are more than half of the healthy ones: those and the
    replicas of all live members."""
    healthy = set(joined)
    for member in live:
        join = newest.get(member)
        healthy.add(join.replica_id if join else replica_of.get(member, f"member {member}"))
    return 2 * len(joined) > len(healthy)


def _newest_is_elsewhere(
    present: Iterable[Join], line: Line | None, holders: Collection[Identity]
) -> bool:
    """Whether only processes that have not asked hold the newest committed state."""
    if line is None or line.head == 0 or not holders:
        return False
    return not any((join.branch, join.head) == (line.branch, line.head) for join in present)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A quorum as one of its members sees it; the first four are by replica, not by member.

    ``newest_rank`` is None for a replica that is behind. ``contributors`` are the members of the
    same rank whose tensors are summed, in order.
    """

    rank: int
    size: int
    newest_rank: int | None
    newest_size: int
    heals: bool
    seat: Seat
    source: Seat
    contributors: tuple[Seat, ...]


def standing(
    quorum: Quorum, member: int, *, healed_take_part: bool, heal: bool, at_most: int | None
) -> Standing:
    """``healed_take_part``: who heals does so before the step, and then contributes like anybody;
    without ``heal`` nobody heals; ``at_most`` replicas contribute, the others are spares."""
    seat = next(seat for seat in quorum.seats if seat.member == member)
    row = [other for other in quorum.seats if other.rank == seat.rank]
    newest = [other for other in row if other.newest]
    names = [other.replica_id for other in newest]
    taking_part = row if healed_take_part else newest
    contributors = [
        other for other in taking_part[:at_most] if healed_take_part or not (heal and other.heals)
    ]
    return Standing(
        rank=row.index(seat),
        size=len(row),
        newest_rank=names.index(seat.replica_id) if seat.replica_id in names else None,
        newest_size=len(newest),
        heals=heal and seat.heals,
        seat=seat,
        source=newest[0],
        contributors=tuple(contributors),
    )


def participants(quorum: Quorum, *, healed_take_part: bool) -> frozenset[int]:
    """The members without all of whom the step does not count."""
    return frozenset(seat.member for seat in quorum.seats if healed_take_part or seat.newest)


def decide_verdict(
    quorum: Quorum,
    votes: Mapping[int, Vote],
    *,
    c: int,
    me: Identity,
    needed: frozenset[int],
    gone: Collection[int],
    out_of_time: bool,
) -> Verdict | None:
    """The commit to propose, or None to go on waiting. ``needed`` are :func:`participants`."""
    against = {member for member, vote in votes.items() if not vote.ok}
    missing = {seat.member for seat in quorum.seats} - set(votes) - set(gone)
    if missing and not out_of_time and not against & needed:
        return None
    included = tuple(sorted(member for member, vote in votes.items() if vote.ok))
    committed = needed <= set(included)
    return Verdict(n=quorum.n, c=c, included=included, writer=me, committed=committed)


def counts(quorum: Quorum, verdict: Verdict, *, needed: frozenset[int], member: int) -> bool:
    """Whether the step is done for ``member``: all who are needed are in, and so is all of its own
    replica."""
    seat = next(seat for seat in quorum.seats if seat.member == member)
    own = {other.member for other in quorum.seats if other.replica_id == seat.replica_id}
    return (needed | own) <= set(verdict.included)
