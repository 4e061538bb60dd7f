"""Which committed state a round of the torchft-shaped Manager starts from: pure functions.

Committed rounds form a line: each starts from the state that the committed round before it made.
The line forks when every process that holds the newest state is gone and the group goes on from an
older one (a saved state, the state of a replica that was behind, a checkpoint that the user
loaded). The new *branch* has the number of the round that began it. What the abandoned rounds had
made is never taken up again: a replica that still holds such a state heals, and a saved one is not
resumed from.

A state is identified by its branch, the round whose commit made it (its *head*), and its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from diloco.errors import ReplicaError
from diloco.protocol.manager_records import Join, Quorum, Segment

UNKNOWN = -1
"""The branch of a state that no round has started from: a new process's own."""
MIXED = -2
"""The branch of a replica whose ranks hold different states."""


class AbandonedBranch(ReplicaError):
    """Every replica that asks for a quorum holds a state that the group has left behind."""


@dataclass(frozen=True, order=True)
class StateId:
    branch: int
    head: int
    step: int


@dataclass(frozen=True)
class Line:
    """The committed rounds that the next one continues: ``past`` segments, then ``branch`` up to
    round ``head`` (0: none of that branch is committed yet)."""

    branch: int = 0
    head: int = 0
    past: tuple[Segment, ...] = ()

    def contains(self, branch: int, head: int) -> bool:
        """Whether the state after round ``head`` of ``branch`` is on this line."""
        if branch == self.branch:
            return head <= self.head
        return any(part.branch == branch and head <= part.until for part in self.past)

    def forked_from(self, state: StateId, n: int) -> Line:
        """The line of a branch that round ``n`` begins from ``state``."""
        if not self.contains(state.branch, state.head):
            return Line(branch=n)
        parts = (*self.past, Segment(branch=self.branch, until=self.head))
        kept = [part for part in parts if part.branch < state.branch]
        return Line(branch=n, past=(*kept, Segment(branch=state.branch, until=state.head)))


def line_before(previous: Quorum | None, *, committed: bool) -> Line:
    """The line that the round after ``previous`` continues."""
    if previous is None:
        return Line()
    head = previous.n if committed or previous.head < 0 else previous.head
    return Line(branch=previous.branch, head=head, past=previous.line)


def state_of(ranks: Iterable[Join], line: Line) -> StateId:
    """The state of one replica group."""
    joins = list(ranks)
    found = {StateId(join.branch, join.head, join.step) for join in joins}
    step = min(join.step for join in joins)
    if len({(state.branch, state.head) for state in found}) > 1:
        return StateId(MIXED, 0, step)
    state = min(found)
    if state.branch == UNKNOWN and step == 0 and line.head == 0:
        return StateId(line.branch, 0, 0)  # everyone begins there
    return state


def starting_state(states: Mapping[str, StateId], line: Line) -> StateId:
    """The state that a round of these replicas starts from: the newest of the line, or that of a
    process with a state of its own which is further. Raises :class:`AbandonedBranch`."""
    usable = [
        (state.step, line.contains(state.branch, state.head), state.head, state)
        for state in states.values()
        if state.branch == UNKNOWN or line.contains(state.branch, state.head)
    ]
    if not usable:
        raise AbandonedBranch(
            f"expected a replica with a state of the group's branch {line.branch}, found "
            f"only states that it has left behind, of {', '.join(sorted(states))}. Restart these "
            "processes: they resume from the newest saved state"
        )
    return max(usable)[-1]


def continues(line: Line, state: StateId) -> bool:
    """Whether a round from ``state`` continues the line; else it begins a branch."""
    return (state.branch, state.head) == (line.branch, line.head)
