"""The cost of failing replicas to a group: missing replicas, lost work, waiting survivors.

Pure arithmetic, for :mod:`diloco.planner.prediction`. With N replicas and quorum K:

- A replica fails every ``mtbf_s`` on average and is absent for D, so its availability is ``a = mtbf
  / (mtbf + D)``. For M learners that share a fleet, whose MTBF is that of the whole fleet, this is
  ``M * MTBF / (M * MTBF + D)``, up to 4.3 points from the goodput that Decoupled DiLoCo reports of
  its elastic learners (arXiv:2604.21428, ``bench/simulate_papers.py``).
- A round needs K of N replicas. Replicas fail independently, so the number of live replicas is
  binomial(N, a); below K the group waits.
- The work that a replica had not contributed before it failed is lost. It contributes every ``x = H
  * step_s / mtbf`` of its expected lifetime; with exponential lifetimes a share of ``x / (exp(x) -
  1)`` is kept, about ``1 - x/2`` (the renewal argument for checkpoint intervals: Young 1974, Daly
  2006).
- A contribution that misses its round (a share ``late_share`` of them) enters with a later one. The
  replica keeps the share ``late_keep`` of it in each missed round but the first in a row, and
  nothing if ``late_keep`` is 0
  (:mod:`diloco.protocol.round_weights`; :func:`late_work_share` has the sum). The component that it
  drops is work that the others have done as well, and is not counted as lost.
- The survivors wait for a failed replica until its heartbeats are missed, and for its successor,
  which starts in the middle of a round: with partial rounds until it finds that it is the last one.
  Both waits are limited by the grace window, reduced by the overlap, and averaged over a uniformly
  distributed time in the round.

Not modelled: adaptive grace and quarantine, correlated failures (a zone, a backend).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from diloco.protocol.control_pace import BEATS_PER_TIMEOUT, SUSPECTED_SHARE, is_short_round
from diloco.protocol.round_weights import keeps_late_work
from diloco.protocol.settings import GroupSettings


@dataclass(frozen=True, kw_only=True)
class AvailabilityEstimate:
    """The effect of failures on a group.

    ``availability`` is that of one replica, ``quorum_share`` the share of time with a quorum,
    ``live_share`` the share of live replicas during that time, ``kept_share`` the share of their
    work that is contributed before they fail and enters the global weights. Survivors lose
    ``stall_s`` per failure. ``slowdown`` is wall time relative to a run without failures;
    ``goodput`` the work per time relative to N healthy replicas.
    """

    availability: float
    quorum_share: float
    live_share: float
    kept_share: float
    stall_s: float
    failures_per_s: float

    @property
    def slowdown(self) -> float:
        """Wall time relative to a run without failures."""
        if not self.quorum_share:
            return math.inf
        return (1 + self.failures_per_s * self.stall_s) / self.quorum_share

    @property
    def goodput(self) -> float:
        """Work per time relative to N healthy replicas."""
        return self.live_share * self.kept_share / self.slowdown


def estimate_availability(
    settings: GroupSettings,
    *,
    mtbf_s: float,
    away_s: float,
    step_s: float,
    late_share: float = 0.0,
) -> AvailabilityEstimate:
    """Estimate the effect of failures and of late contributions.

    ``mtbf_s`` is that of one replica (inf: it never fails), ``away_s`` the time from its failure to
    the return of its successor, ``late_share`` the share of contributions that miss their round.
    """
    replicas = settings.num_replicas
    live_probability = availability(mtbf_s, away_s)
    quorum_share, live_share = quorum(replicas, settings.min_quorum, live_probability)
    return AvailabilityEstimate(
        availability=live_probability,
        quorum_share=quorum_share,
        live_share=live_share,
        kept_share=kept_share(settings.sync_every * step_s, mtbf_s)
        * late_work_share(late_share, settings.late_keep if keeps_late_work(settings) else 0.0),
        stall_s=stall_of_a_failure_s(settings, step_s=step_s),
        failures_per_s=replicas * live_probability / mtbf_s,
    )


def availability(mtbf_s: float, away_s: float) -> float:
    """Return the share of time that a replica is live."""
    return 1.0 if mtbf_s == math.inf else mtbf_s / (mtbf_s + away_s)


@lru_cache(maxsize=256)  # a sweep over H repeats the same arguments
def quorum(replicas: int, least: int, live_probability: float) -> tuple[float, float]:
    """Return the probability that at least ``least`` replicas are live, and the mean share of live
    replicas in that case. ``there`` is the availability of one replica."""
    if live_probability >= 1:
        return 1.0, 1.0
    if live_probability <= 0:  # the availability underflows
        return 0.0, 0.0
    log_live, log_absent = math.log(live_probability), math.log1p(-live_probability)
    quorum_share = live = 0.0
    for count in range(least, replicas + 1):
        absent = replicas - count
        log_combinations = (
            math.lgamma(replicas + 1) - math.lgamma(count + 1) - math.lgamma(absent + 1)
        )
        probability = math.exp(log_combinations + count * log_live + absent * log_absent)
        quorum_share += probability
        live += probability * count
    return min(1.0, quorum_share), live / quorum_share / replicas if quorum_share else 0.0


def kept_share(unit_s: float, mtbf_s: float) -> float:
    """Return the share of a replica's work that is contributed before it fails, in units of
    ``unit_s``."""
    x = unit_s / mtbf_s
    if x > 700:  # exp would overflow; the share is zero
        return 0.0
    return x / math.expm1(x) if x else 1.0


def late_work_share(late_share: float, late_keep: float) -> float:
    """Return the share of the work that enters, now or later, if a contribution misses its round
    with probability p = ``late_share``.

    ``(1 - p) * (1 + p * s / (1 - p * late_keep))``. Of the work that misses its round, ``s = 1 - p
    + p * late_keep`` is kept in it, all unless the replica had missed the round before, and the
    share ``late_keep`` in each further round that is missed. 1 - p if ``late_keep`` is 0.
    """
    if not late_keep:
        return 1 - late_share
    own_round = 1 - late_share + late_share * late_keep
    return (1 - late_share) * (1 + late_share * own_round / (1 - late_share * late_keep))


def stall_of_a_failure_s(settings: GroupSettings, *, step_s: float) -> float:
    """Return the mean seconds that the survivors wait for one failure and one return."""
    if settings.num_replicas == 1:
        return 0.0
    round_s = settings.round_steps * step_s
    hidden_s = settings.overlap_steps * step_s
    timeout_s, window_s = settings.heartbeat_timeout_s, settings.grace_s
    suspected_s = timeout_s * SUSPECTED_SHARE
    if is_short_round(round_s, timeout_s):  # it is suspected half a timeout after its failure
        dead_s = _mean_clamped(suspected_s - hidden_s, round_s, window_s)
    else:
        # Half a timeout after it was asked for heartbeats, and without that half a timeout after it
        # missed the one that is due once per timeout: half a timeout old on average.
        dead_s = _mean_clamped(timeout_s - hidden_s, round_s, min(suspected_s, window_s))
    joins_s = min(window_s, timeout_s / BEATS_PER_TIMEOUT)
    longest_s = joins_s if settings.partial_rounds == "on" else window_s
    late_s = _mean_clamped(round_s - hidden_s, round_s, longest_s)
    return dead_s + late_s


def _mean_clamped(most_s: float, span_s: float, cap_s: float) -> float:
    """Return the mean of ``most - u``, clamped to 0..cap, for u uniform in 0..span."""

    def area(x: float) -> float:
        return x * x / 2 if x > 0 else 0.0

    above = area(most_s - cap_s) - area(most_s - cap_s - span_s)
    return (area(most_s) - area(most_s - span_s) - above) / span_s
