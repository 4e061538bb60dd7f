"""Selects the committed state that a round of the torchft-compatible Manager starts from. Pure
functions.

Committed rounds form a line: each starts from the state of the committed round before it. The line
forks when every process with the newest state is gone and the group continues from an older one (a
saved state, the state of a replica that was behind, a checkpoint that the user loaded). The new
*branch* is numbered by the round that began it. The results of the abandoned rounds are never used
again: a replica with such a state heals, and a saved state of them is not resumed from.

A state is identified by its branch, the round whose commit produced it (its *head*), and its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from diloco.errors import ReplicaError
from diloco.protocol.manager_records import Join, Quorum, Segment

UNKNOWN = -1
"""Branch of a state that no round has started from: the initial state of a new process."""
MIXED = -2
"""Branch of a replica whose ranks hold different states."""


class AbandonedBranch(ReplicaError):
    """Every replica that requests a quorum holds a state of an abandoned branch."""


@dataclass(frozen=True, order=True)
class StateId:
    """Identifies a committed state by branch, head round and step."""

    branch: int
    head: int
    step: int


@dataclass(frozen=True)
class Line:
    """The committed rounds that the next one continues: the ``past`` segments, then ``branch`` up
    to round ``head`` (0: no round of the branch is committed yet)."""

    branch: int = 0
    head: int = 0
    past: tuple[Segment, ...] = ()

    def contains(self, branch: int, head: int) -> bool:
        """Return whether the state after round ``head`` of ``branch`` is on this line."""
        if branch == self.branch:
            return head <= self.head
        return any(part.branch == branch and head <= part.until for part in self.past)

    def forked_from(self, state: StateId, n: int) -> Line:
        """Return the line of the branch that round ``n`` begins from ``state``."""
        if not self.contains(state.branch, state.head):
            return Line(branch=n)
        parts = (*self.past, Segment(branch=self.branch, until=self.head))
        kept = [part for part in parts if part.branch < state.branch]
        return Line(branch=n, past=(*kept, Segment(branch=state.branch, until=state.head)))


def line_before(previous: Quorum | None, *, committed: bool) -> Line:
    """Return the line that the round after ``previous`` continues."""
    if previous is None:
        return Line()
    head = previous.n if committed or previous.head < 0 else previous.head
    return Line(branch=previous.branch, head=head, past=previous.line)


def state_of(ranks: Iterable[Join], line: Line) -> StateId:
    """Return the state of one replica group, given the joins of all its ranks."""
    joins = list(ranks)
    states = {StateId(join.branch, join.head, join.step) for join in joins}
    step = min(join.step for join in joins)
    if len({(state.branch, state.head) for state in states}) > 1:
        return StateId(MIXED, 0, step)
    state = min(states)
    if state.branch == UNKNOWN and step == 0 and line.head == 0:
        return StateId(line.branch, 0, 0)  # the common initial state
    return state


def starting_state(states: Mapping[str, StateId], line: Line) -> StateId:
    """Return the state that a round of these replicas starts from: the newest on the line, or a new
    process's own state if its step is higher. Raises :class:`AbandonedBranch`."""
    usable = [
        (state.step, line.contains(state.branch, state.head), state.head, state)
        for state in states.values()
        if state.branch == UNKNOWN or line.contains(state.branch, state.head)
    ]
    if not usable:
        raise AbandonedBranch(
            f"expected a replica with a state of the group's branch {line.branch}, found "
            f"only abandoned states, of {', '.join(sorted(states))}. Restart these "
            "processes: they resume from the newest saved state"
        )
    return max(usable)[-1]


def continues(line: Line, state: StateId) -> bool:
    """Return whether a round from ``state`` continues the line; otherwise it begins a branch."""
    return (state.branch, state.head) == (line.branch, line.head)
