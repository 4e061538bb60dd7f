"""The decisions of a round of the torchft-compatible Manager: pure functions of records and elapsed
time.

A quorum is formed when every live member has requested it; when every member of the previous quorum
has, so that a newcomer that is not ready delays no other member; or when the timeout has passed. A
replica group counts when all its ranks are present. The replicas with the newest step
*participate*; the others heal: they load the first participant's state. At step 0 all but the first
participant heal, unless ``init_sync`` is off because all start with equal weights.
:mod:`~diloco.protocol.manager_branches` decides which state is the newest.

The majority guard is torchft's rule: unless every process of the previous quorum is present, a
quorum needs more than half of the healthy replicas. In addition, no quorum starts from an older
state while a process with the newest committed state is alive and has not requested it.

A commit is decided when every member of the quorum has voted or is gone, or at the timeout; a
negative vote of a participant decides at once. The step counts only if all participants of all
ranks are included, because a sum that is divided by their number must contain all of them.
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
from diloco.protocol.manager_records import CommitDecision, Join, Quorum, QuorumMember, Vote
from diloco.protocol.records import Identity


class ConfigMismatch(ValueError):
    """Members have different configurations, so no quorum would mean the same to all of them."""


def newest_joins(joins: Iterable[Join]) -> dict[int, Join]:
    """Return the join of the newest process of each member."""
    newest: dict[int, Join] = {}
    for join in joins:
        if join.member not in newest or join.incarnation > newest[join.member].incarnation:
            newest[join.member] = join
    return newest


def complete_replicas(joins: Iterable[Join]) -> dict[str, tuple[Join, ...]]:
    """Return the replica groups with all ranks present, sorted by name."""
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
    """Return the quorum to propose, or None to keep waiting.

    ``joins`` are those of processes not known to be dead, ``live`` the members with a live lease,
    ``waited_s`` the seconds since enough replicas were present. ``replica_of`` maps a live member
    that has not joined to its replica; a member it lacks counts as a separate replica. ``line`` is
    the line that this round continues, ``holders`` the live processes with its newest state;
    without a line the highest step is the newest.

    Raises :class:`ConfigMismatch`, :class:`~diloco.protocol.manager_branches.AbandonedBranch`.
    """
    newest = newest_joins(joins)
    _check_configuration(newest.values())
    joined = complete_replicas(newest.values())
    shrinking = previous is not None and any(join.shrink_only for join in newest.values())
    replicas = _members_of(previous, joined) if shrinking else joined
    present = [join for group in replicas.values() for join in group]
    if not present or len(replicas) < max(join.min_replicas for join in present):
        return None
    if waited_s < join_timeout_s and _is_awaited(present, previous, live, shrinking=shrinking):
        return None
    if majority_guard:
        is_superset = previous is not None and _processes(previous.seats) <= _processes(present)
        if not is_superset and not is_majority(joined, newest, live, replica_of or {}):
            return None
        if _newest_is_elsewhere(present, line, holders):
            return None
    return _propose(replicas, n=n, me=me, previous=previous, line=line)


def _check_configuration(joins: Collection[Join]) -> None:
    for field_name in ("mode", "allow_heal"):
        values = {str(getattr(join, field_name)) for join in joins}
        if len(values) > 1:
            raise ConfigMismatch(
                f"expected the same {field_name} of every member, found {sorted(values)}"
            )


def _members_of(
    quorum: Quorum | None, replicas: Mapping[str, tuple[Join, ...]]
) -> dict[str, tuple[Join, ...]]:
    """Return those of the replicas that are in ``quorum``."""
    members = {seat.replica_id for seat in quorum.seats} if quorum else set()
    return {name: group for name, group in replicas.items() if name in members}


def _is_awaited(
    present: Iterable[Join],
    previous: Quorum | None,
    live: Collection[int],
    *,
    shrinking: bool,
) -> bool:
    """Return whether a live member is missing and the previous quorum is not complete either."""
    present_members = {join.member for join in present}
    previous_members = {seat.member for seat in previous.seats} if previous else set()
    if previous_members and previous_members <= present_members:
        return False
    awaited = set(live) & previous_members if shrinking else set(live)
    return not awaited <= present_members


def _propose(
    replicas: Mapping[str, tuple[Join, ...]],
    *,
    n: int,
    me: Identity,
    previous: Quorum | None,
    line: Line | None,
) -> Quorum:
    """Return quorum ``n`` of these replicas, which starts from the newest state of ``line``, or
    without a line from the highest step."""
    present = [join for group in replicas.values() for join in group]
    if line is None:
        line = Line()
        steps = {name: state_of(group, line).step for name, group in replicas.items()}
        states = {name: StateId(UNKNOWN, 0, step) for name, step in steps.items()}
    else:
        states = {name: state_of(group, line) for name, group in replicas.items()}
    start = starting_state(states, line)
    if previous is not None and not continues(line, start):
        line = line.forked_from(start, n)
    first = next(name for name in replicas if states[name] == start)
    all_heal = start.step == 0 and any(join.init_sync for join in present)
    return Quorum(
        n=n,
        step=start.step,
        mode=present[0].mode,
        seats=tuple(
            QuorumMember(
                member=join.member,
                incarnation=join.incarnation,
                replica_id=join.replica_id,
                rank=join.rank,
                step=states[join.replica_id].step,
                heals=states[join.replica_id] != start or (all_heal and join.replica_id != first),
                newest=states[join.replica_id] == start,
            )
            for join in present
        ),
        writer=me,
        branch=line.branch,
        head=line.head,
        line=line.past,
    )


def _processes(records: Iterable[Join | QuorumMember]) -> set[tuple[int, str]]:
    return {(record.member, record.incarnation) for record in records}


def is_majority(
    joined: Collection[str],
    newest: Mapping[int, Join],
    live: Collection[int],
    replica_of: Mapping[int, str],
) -> bool:
    """Return whether the replicas in ``joined`` are more than half of the healthy ones, which are
    those and the replicas of all live members."""
    healthy = set(joined)
    for member in live:
        join = newest.get(member)
        healthy.add(join.replica_id if join else replica_of.get(member, f"member {member}"))
    return 2 * len(joined) > len(healthy)


def _newest_is_elsewhere(
    present: Iterable[Join], line: Line | None, holders: Collection[Identity]
) -> bool:
    """Return whether only processes that have not requested the quorum hold the newest committed
    state."""
    if line is None or line.head == 0 or not holders:
        return False
    return not any((join.branch, join.head) == (line.branch, line.head) for join in present)


@dataclass(frozen=True, kw_only=True)
class MemberView:
    """A quorum as one of its members sees it. Ranks and sizes count replicas, not members.

    ``newest_rank`` is None for a replica that is behind. ``contributors`` are the members of the
    same rank whose tensors are summed, in order.
    """

    rank: int
    size: int
    newest_rank: int | None
    newest_size: int
    heals: bool
    seat: QuorumMember
    source: QuorumMember
    contributors: tuple[QuorumMember, ...]


def member_view(
    quorum: Quorum, member: int, *, healed_take_part: bool, heal: bool, at_most: int | None
) -> MemberView:
    """Return the view of ``member`` on ``quorum``.

    ``healed_take_part``: a healing member heals before the step and then contributes. ``heal``
    False: no member heals. ``at_most``: maximum number of contributing replicas; the others are
    spares.
    """
    seat = next(seat for seat in quorum.seats if seat.member == member)
    row = [other for other in quorum.seats if other.rank == seat.rank]
    newest = [other for other in row if other.newest]
    names = [other.replica_id for other in newest]
    taking_part = row if healed_take_part else newest
    contributors = [
        other for other in taking_part[:at_most] if healed_take_part or not (heal and other.heals)
    ]
    return MemberView(
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
    """Return the members without which the step does not count."""
    return frozenset(seat.member for seat in quorum.seats if healed_take_part or seat.newest)


def decide_commit(
    quorum: Quorum,
    votes: Mapping[int, Vote],
    *,
    c: int,
    me: Identity,
    needed: frozenset[int],
    gone: Collection[int],
    out_of_time: bool,
) -> CommitDecision | None:
    """Return the commit decision to propose, or None to keep waiting. ``needed`` are the
    :func:`participants`."""
    against = {member for member, vote in votes.items() if not vote.ok}
    missing = {seat.member for seat in quorum.seats} - set(votes) - set(gone)
    if missing and not out_of_time and not against & needed:
        return None
    included = tuple(sorted(member for member, vote in votes.items() if vote.ok))
    committed = needed <= set(included)
    return CommitDecision(n=quorum.n, c=c, included=included, writer=me, committed=committed)


def counts(
    quorum: Quorum, decision: CommitDecision, *, needed: frozenset[int], member: int
) -> bool:
    """Return whether the step counts for ``member``: all needed members and all members of its
    replica are included."""
    seat = next(seat for seat in quorum.seats if seat.member == member)
    own = {other.member for other in quorum.seats if other.replica_id == seat.replica_id}
    return (needed | own) <= set(decision.included)
