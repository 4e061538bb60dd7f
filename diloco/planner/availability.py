"""What failing replicas cost a group: time without them, work that is lost, waiting for them.

Pure arithmetic, for :mod:`diloco.planner.prediction`. With N replicas and quorum K:

- A replica dies every ``mtbf_s`` on average and is away for D, so it is there for
  ``a = mtbf / (mtbf + D)`` of the time. For M learners that share a fleet, whose MTBF is counted
  over all of it, this is ``M * MTBF / (M * MTBF + D)``, which describes the goodput that Decoupled
  DiLoCo reports (arXiv:2604.21428).
- A round needs K of N. Replicas fail independently, so the number that is there is binomial(N, a);
  below K everybody waits.
- What a dead replica had not contributed is lost. It contributes every ``x = H * step_s / mtbf`` of
  its expected life; with exponential lifetimes ``x / (exp(x) - 1)`` of the work is kept, about
  ``1 - x/2`` (the renewal argument of checkpoint intervals: Young 1974, Daly 2006).
- The survivors wait for a dead replica until its lease is out, and for its successor, which begins
  in the middle of a round, to arrive: both at most for the grace window, both less what overlap
  hides, both averaged over a moment that is uniform in the round.

Left out: adaptive grace and quarantine, failures that come together (a zone, a backend).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from diloco.protocol.settings import GroupSettings


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """``availability`` is of one replica; ``quorum_share`` of the time a quorum is there, and then
    ``live_share`` of the replicas is; ``kept_share`` of their work is contributed before they die.
    Survivors lose ``stall_s`` with each failure. ``slowdown`` is wall time over the time without
    failures; ``goodput`` the share of N healthy replicas' work that is done in a given time."""

    availability: float
    quorum_share: float
    live_share: float
    kept_share: float
    stall_s: float
    failures_per_s: float

    @property
    def slowdown(self) -> float:
        if not self.quorum_share:
            return math.inf
        return (1 + self.failures_per_s * self.stall_s) / self.quorum_share

    @property
    def goodput(self) -> float:
        return self.live_share * self.kept_share / self.slowdown


def look_ahead(settings: GroupSettings, *, mtbf_s: float, away_s: float, step_s: float) -> Outlook:
    """``mtbf_s`` is one replica's, inf for never; ``away_s`` from its death to its return."""
    replicas = settings.num_replicas
    there = availability(mtbf_s, away_s)
    enough, live_share = quorum(replicas, settings.min_quorum, there)
    return Outlook(
        availability=there,
        quorum_share=enough,
        live_share=live_share,
        kept_share=kept_share(settings.sync_every * step_s, mtbf_s),
        stall_s=stall_of_a_failure_s(settings, step_s=step_s),
        failures_per_s=replicas * there / mtbf_s,
    )


def availability(mtbf_s: float, away_s: float) -> float:
    """Share of the time a replica is there."""
    return 1.0 if mtbf_s == math.inf else mtbf_s / (mtbf_s + away_s)


@lru_cache(maxsize=256)  # a sweep over H asks for the same again and again
def quorum(replicas: int, least: int, there: float) -> tuple[float, float]:
    """How often at least ``least`` of the replicas are there, and the share of them that is there
    then, on average: (1, 1) if none ever fails."""
    if there >= 1:
        return 1.0, 1.0
    if there <= 0:  # so seldom that no float holds it
        return 0.0, 0.0
    log_there, log_away = math.log(there), math.log1p(-there)
    enough = live = 0.0
    for count in range(least, replicas + 1):
        away = replicas - count
        ways = math.lgamma(replicas + 1) - math.lgamma(count + 1) - math.lgamma(away + 1)
        chance = math.exp(ways + count * log_there + away * log_away)
        enough += chance
        live += chance * count
    return min(1.0, enough), live / enough / replicas if enough else 0.0


def kept_share(unit_s: float, mtbf_s: float) -> float:
    """Share of a replica's work that is contributed before it dies, in units of ``unit_s``."""
    x = unit_s / mtbf_s
    if x > 700:  # exp would overflow; nothing is left by then
        return 0.0
    return x / math.expm1(x) if x else 1.0


def stall_of_a_failure_s(settings: GroupSettings, *, step_s: float) -> float:
    """Seconds the survivors wait because of one death and one return, on average."""
    if settings.num_replicas == 1:
        return 0.0
    round_s = settings.round_steps * step_s
    hidden_s = settings.overlap_steps * step_s
    most_s = {"dead": settings.heartbeat_timeout_s - hidden_s, "late": round_s - hidden_s}
    return sum(_mean_clamped(most, round_s, settings.grace_s) for most in most_s.values())


def _mean_clamped(most_s: float, span_s: float, cap_s: float) -> float:
    """Mean of ``most - u``, clamped to 0..cap, for u uniform in 0..span."""

    def area(x: float) -> float:
        return x * x / 2 if x > 0 else 0.0

    above = area(most_s - cap_s) - area(most_s - cap_s - span_s)
    return (area(most_s) - area(most_s - span_s) - above) / span_s
