"""How fast everybody is: dynamic local updates, so that fast and slow GPUs arrive together."""

from __future__ import annotations

from diloco.protocol.records import Plan


class Pace:
    """The speeds that the last plan showed, in inner steps per second, by replica."""

    def __init__(self) -> None:
        self._speeds: dict[int, float] = {}

    def learn(self, plan: Plan) -> None:
        self._speeds = {
            c.replica: c.steps / c.compute_s for c in plan.contributions if c.compute_s > 0
        }

    def steps(self, replica: int, most: int) -> int:
        """``H_w = max(1, floor(v_w / max v * H))`` (arXiv:2401.09135); H where v_w is unknown."""
        own = self._speeds.get(replica)
        if own is None:
            return most
        return max(1, int(own / max(self._speeds.values()) * most + 1e-9))
