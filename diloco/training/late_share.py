"""The share of its progress that a replica keeps when a round is committed without it."""

from __future__ import annotations

from diloco.protocol.records import Plan
from diloco.protocol.round_weights import HUNG_AFTER, MOST_AWAY, STEADY_ROUNDS, keeps_late_work
from diloco.protocol.settings import GroupSettings


class LateShare:
    """Follows the plans of the rounds that a replica applies.

    It keeps all of its progress while it is away (:mod:`diloco.protocol.round_weights`), for
    :data:`HUNG_AFTER` rounds at most, and ``late_keep`` otherwise. A replica that is cut off from
    the store counts as dead, so that no plan names it. It is away as well if most of the others
    continued without it: none of them left room for it.
    """

    def __init__(self, replica: int, settings: GroupSettings) -> None:
        self._replica = replica
        self._settings = settings
        self._is_away = False
        self._missed = 0
        self._size = 0
        """Replicas in the last plan that names this one."""

    def of(self, plan: Plan | None) -> float:
        """Return the share that is kept if the round of ``plan`` does not include this replica;
        None: the round is void, or its plan unknown. Called once for each round, in their order.
        """
        self._follow(plan)
        if not keeps_late_work(self._settings):
            return 0.0
        return 1.0 if self._is_away and self._missed <= HUNG_AFTER else self._settings.late_keep

    def _follow(self, plan: Plan | None) -> None:
        if plan is None:
            self._is_away, self._missed, self._size = False, self._missed + 1, 0
            return
        late = next((late for late in plan.late if late.replica == self._replica), None)
        decided = {c.replica for c in plan.contributions} | {r.replica for r in plan.refused}
        if late:
            self._is_away, self._missed = late.away, late.missed
        elif self._replica in decided:
            self._is_away, self._missed = False, 0
        else:
            self._missed += 1
            was_away = plan.steady_rounds >= STEADY_ROUNDS if self._missed == 1 else self._is_away
            self._is_away = was_away and len(plan.contributions) >= (1 - MOST_AWAY) * self._size > 0
            return
        self._size = len(plan.contributions) + len(plan.late)
