"""When a waiting process polls, and which of them lists.

Listings and leases cost each reader N requests, so only two processes of a group list; all others
poll one key, most often around the time at which it is expected.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from diloco.clock import Clock
from diloco.membership.observer import Observer
from diloco.protocol.control_pace import BEATS_PER_TIMEOUT
from diloco.protocol.records import Identity

FIRST_PAUSE_S = 0.03
LONGEST_FLOOR_S = 1.0
"""Longest pause around the expected time."""
LONGEST_PAUSE_S = 16.0
LISTINGS_PER_TIMEOUT = BEATS_PER_TIMEOUT
"""Listings of the first process in a heartbeat timeout, at least: leases do not change more
often."""
SHARPNESS = 4
"""Pauses around the expected time, in a wait of the usual length."""
APPROACH = 0.75
"""Share of the time until then after which a process polls again."""
REMEMBERED = 3
"""Waits of the past from which the next one is expected."""
SIMILAR = 0.75
"""Share of the median that the shortest of them has at least, if they are of one kind."""
LISTING = 2
"""Processes that list, if they are alive."""
SECOND_AFTER_S = 2.0
"""Time after which the second of them begins: usually the first has acted by then."""
SECOND_PAUSES = 2
"""Its longest pause, in those of the first: the first acts while it is alive."""


class ExpectedWait:
    """Predicts a wait from the last ones of its kind.

    The shortest of them counts: after an outage no process oversleeps, and a straggler of every
    round is expected. If it is similar to the others, the median counts, because a wait is known up
    to the pause between two polls only, and a prediction that is too early costs a poll a second.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        """Add the length of one wait."""
        self._last.append(seconds)

    def is_longer(self, seconds: float) -> bool:
        """Return whether each of the last waits took more than ``seconds``."""
        return min(self._last, default=0.0) > seconds

    def pause_s(self, waited_s: float) -> float:
        """Return the time to the next poll: short around the expected length of the wait, long
        before and after it."""
        shortest_s = min(self._last, default=0.0)
        usual_s = statistics.median(self._last) if self._last else 0.0
        expected_s = usual_s if shortest_s >= SIMILAR * usual_s else shortest_s
        floor_s = min(LONGEST_FLOOR_S, max(FIRST_PAUSE_S, usual_s / SHARPNESS))
        missing_s = expected_s - waited_s
        pause_s = missing_s * APPROACH if missing_s > 0 else -missing_s / 3
        return min(LONGEST_PAUSE_S, max(floor_s, pause_s))


class Turn:
    """Whether this process lists in one stage of a round.

    ``candidates`` is the same list in every process: the contributors of the last plan. The first
    two list; the others read the leases of those two, one GET each. If both are gone, or have not
    reached the round, the next two list, then the next four, eight and so on. A process outside the
    list comes last. So any survivor lists in the end, and few processes do while the first are
    alive.
    """

    def __init__(
        self,
        observer: Observer,
        candidates: Sequence[Identity],
        me: Identity,
        round: int,
        *,
        clock: Clock,
        timeout_s: float,
    ) -> None:
        self._observer = observer
        self._round = round
        self._clock = clock
        self.timeout_s = timeout_s
        replicas = [candidate.replica for candidate in candidates]
        self.place = replicas.index(me.replica) if me.replica in replicas else len(replicas)
        self._ahead = _groups(candidates[: self.place])
        self._check_s = clock.monotonic() + timeout_s * self.group
        self.is_due = not self._ahead

    @property
    def group(self) -> int:
        """Number of groups of candidates before this process's own."""
        return len(self._ahead)

    def check(self) -> bool:
        """Read the leases of the candidates that list, if it is time to; return whether it was.

        The leases are read after one heartbeat timeout for each group ahead, because each of these
        takes over first, and then once per timeout: a process that is gone is known after two
        reads.
        """
        if not self._ahead or self._clock.monotonic() < self._check_s:
            return False
        self.is_due = not any(self._is_active(group) for group in self._ahead)
        self._check_s = self._clock.monotonic() + self.timeout_s
        return True

    def _is_active(self, group: Sequence[Identity]) -> bool:
        """Return whether a candidate of the group lists; reads all their leases, so that those of
        dead processes expire together."""
        for process in group:
            self._observer.look_at(process)
        return any(self._observer.has_reached(process, self._round) for process in group)


class Stage:
    """The wait for the plan of a round, or for its commit, since ``began_s``.

    A process lists when it is its turn, the second one a little later. All others look once after
    ``patience_s`` for each group of candidates before them, then when the grace window that they
    saw is over, and at twice the time waited: the first candidates can hang while their leases are
    renewed, and a process has to know when the group is below quorum.
    """

    def __init__(
        self, turn: Turn, expected: ExpectedWait, *, began_s: float, patience_s: float
    ) -> None:
        self.turn = turn
        self.expected = expected
        self.began_s = began_s
        self._first_s = began_s + SECOND_AFTER_S * min(turn.place, 1)
        self._look_s = began_s + patience_s * turn.group

    def lists(self, now_s: float) -> bool:
        """Return whether this process is to list now."""
        if self.turn.is_due:
            return now_s >= self._first_s
        if now_s < self._look_s:
            return False
        self._look_s = now_s + (now_s - self.began_s)
        return True

    def act_at(self, until_s: float) -> None:
        """Look again at ``until_s`` at the latest: a look has shown that there is something to do
        then, if no other process does it."""
        self._look_s = min(self._look_s, until_s)

    def pause_s(self, now_s: float, *, until_s: float, lists: bool) -> float:
        """Return the time to the next poll; nothing is expected before ``until_s`` is reached, but
        a process that lists then acts."""
        pause_s = self.expected.pause_s(now_s - self.began_s)
        if lists:
            longest_s = self.turn.timeout_s / LISTINGS_PER_TIMEOUT
            pause_s = min(pause_s, longest_s * (SECOND_PAUSES if self.turn.place == 1 else 1))
        return min(pause_s, until_s - now_s) if until_s > now_s else pause_s


def patience_s(*, grace_s: float, heartbeat_timeout_s: float, round_timeout_s: float) -> float:
    """Return the patience of a :class:`Stage`: the time in which the first candidates act, but so
    short that a grace window that begins then is over well before the round times out."""
    return min(grace_s + heartbeat_timeout_s, (round_timeout_s - grace_s) / 2)


def _groups(ahead: Sequence[Identity]) -> list[Sequence[Identity]]:
    """Split the candidates before this one: two, two, four, eight, ... The incomplete last group is
    this process's own."""
    groups: list[Sequence[Identity]] = []
    start, end = 0, LISTING
    while end <= len(ahead):
        groups.append(ahead[start:end])
        start, end = end, 2 * end
    return groups
