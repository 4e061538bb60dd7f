"""The progress that a replica keeps when a round is committed without it."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.protocol import round_weights
from diloco.protocol.records import Plan
from diloco.protocol.round_weights import HUNG_AFTER, can_be_away, keeps_late_work
from diloco.protocol.settings import GroupSettings


@dataclass(frozen=True)
class Kept:
    """What a replica keeps of its progress: the ``share`` of it if it is more than one round of
    work, else all. Without the component along the mean pseudo-gradient of the round, unless
    ``along_mean``."""

    share: float
    along_mean: bool = False


ALL, NOTHING = Kept(1.0, along_mean=True), Kept(0.0)


class LateShare:
    """Follows the plans of the rounds that a replica applies.

    It keeps all of its progress while it is away (:mod:`diloco.protocol.round_weights`), for
    :data:`HUNG_AFTER` rounds at most. Otherwise it drops the component along the mean of the round,
    the direction in which the others moved, and keeps the rest: all of one round of work, and the
    share ``late_keep`` if it has missed more. A replica that is cut off from the store counts as
    dead, so that no plan names it. It is away as well if most of the others continued without it:
    none of them left room for it.
    """

    def __init__(self, replica: int, settings: GroupSettings) -> None:
        self._replica = replica
        self._settings = settings
        self._is_away = False
        self._missed = 0
        """Rounds missed in a row."""
        self._members: frozenset[int] = frozenset()
        """The live replicas by the last plan that names this one."""

    def of(self, plan: Plan | None) -> Kept:
        """Return what is kept if the round of ``plan`` does not include this replica;
        None: the plan is unknown. Called once for each round that is not void, in their order."""
        self._follow(plan)
        if not keeps_late_work(self._settings):
            return NOTHING
        if self._is_away and can_be_away(self._settings) and self._missed <= HUNG_AFTER:
            return ALL
        return Kept(self._settings.late_keep)

    def _follow(self, plan: Plan | None) -> None:
        self._missed += 1
        if plan is None:
            self._is_away = False
            return
        contributors = frozenset(c.replica for c in plan.contributions)
        late = {late.replica: late.away for late in plan.late}
        if self._replica in contributors | {refusal.replica for refusal in plan.refused}:
            self._is_away, self._missed = False, 0
        elif self._replica in late:
            self._is_away = late[self._replica]
        else:
            if self._missed == 1:
                self._is_away = plan.steady_rounds >= round_weights.STEADY_ROUNDS
            least = (1 - round_weights.MOST_AWAY) * len(self._members)
            self._is_away &= len(contributors & self._members) >= least > 0
            return
        self._members = contributors | late.keys()
