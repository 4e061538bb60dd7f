"""Dynamic local updates: slow replicas make fewer inner steps, so that all finish together."""

from __future__ import annotations

from diloco.protocol.records import Plan


class DynamicLocalUpdates:
    """The speed of each replica in the last plan, in inner steps per second. A late replica keeps
    its last known speed."""

    def __init__(self) -> None:
        self._speeds: dict[int, float] = {}

    def update(self, plan: Plan) -> None:
        """Read the speeds from a plan."""
        late = {late.replica for late in plan.late}
        known = {replica: speed for replica, speed in self._speeds.items() if replica in late}
        self._speeds = known | {
            c.replica: c.steps / c.compute_s for c in plan.contributions if c.compute_s > 0
        }

    def steps(self, replica: int, most: int) -> int:
        """Return the steps of a replica's next round: ``max(1, floor(v_w / max v * H))``
        (arXiv:2401.09135), or H (``most``) if its speed is unknown."""
        own = self._speeds.get(replica)
        if own is None:
            return most
        return max(1, int(own / max(self._speeds.values()) * most + 1e-9))
