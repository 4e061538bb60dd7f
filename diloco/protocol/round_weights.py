"""The weights of a round's contributions: late work enters once, now or later. Pure functions.

Every round of work that a live replica keeps enters the global weights once, with the weight of one
replica, in this round or in a later one. So the weights of a round are divided among the accepted
contributions A *and* the late replicas L:

    D = sum of u over A + sum of u * late_keep^(m - 1) over L,    w_i = u_i / D

with u = 1 (uniform) or tokens per round of work, and m the rounds in a row that a late replica has
missed. The weights sum to less than one while a replica is late. Its contribution holds several
rounds of work once it arrives, and has the same ``w``: a mean over those present would count late
work twice, once by the larger weights of the others and once when it arrives.

A replica that was late drops the component of its progress along the mean of the round, and keeps
the rest: all of one round of work, and the share ``late_keep`` if it has missed more
(:meth:`diloco.training.local_progress.LocalProgress.apply`). So it brings at most two rounds of
work, or ``1 / (1 - late_keep)`` if that is more, however many it has missed. The room that it gets
is what it keeps of the first missed round's work: one replica's in that round, then ``late_keep``
of the room of the round before. With 0 a late replica carries none, and D counts A alone.

A group that loses contributions regularly needs this room. In any other, a replica that becomes
late is *away*: usually it has an outage, and its room would only make the steps of the others
shorter. It gets none while few replicas are late (:func:`late_replicas`), and keeps all of its
progress (:mod:`diloco.training.late_share`), which counts in addition once it returns. D is so
large then that a round holds at most :data:`MOST_WORK` rounds of work.

- Fragments: the rule holds for each fragment by itself, whose base and rounds of work are its own.
  The plans count missed rounds of any fragment, of which one in P is of this one.
- Void rounds count as missed, although no work shrinks in them.
- Overlap: the steps after the contributed snapshot were not missed; they are kept whole.
- Top-k with error feedback: the residual is work that a round has included; it stays as it is.
- RDA: directions are normalised, lengths are summed with ``w``, which shortens the mean alike.
- Dynamic local updates: a round of work is a round of any number of steps.
- A fixed world size: the contributors fill all places; D counts A alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from diloco.protocol.records import ContributionRecord, LateReplica, Plan, Refusal
from diloco.protocol.round_view import RoundView
from diloco.protocol.settings import GroupSettings

MAX_COUNTED = 10**15
"""Maximum tokens, steps, rounds or seconds of one contribution; weights computed from them are
exact in fp64."""
HUNG_AFTER = 8
"""Rounds in a row that a live replica can miss before the weights leave no more room for it: it
beats, but does not work. One that is away keeps all of its progress for as long."""
STEADY_ROUNDS = 8
"""Rounds in a row in which no replica became late, after which the next one that does is away."""
MOST_AWAY = 1 / 4
"""Share of the live replicas that can be late while some of them are away."""
MOST_WORK = 3.0
"""Most rounds of work that the contributions of a round hold, weighted, if some return that were
away: a quarter of a group with nine rounds each, and the others with one."""


def units_of(tokens: int, rounds: int, weighting: str) -> float:
    """Return the weight of a contribution before division by that of all live replicas."""
    return tokens / rounds if weighting == "tokens" else 1.0


def keeps_late_work(settings: GroupSettings) -> bool:
    """Return whether late replicas keep some of their progress: not with spares, whose weights
    leave no room for it."""
    return settings.late_keep > 0 and settings.world_size_mode != "fixed_with_spares"


def can_be_away(settings: GroupSettings) -> bool:
    """Return whether late replicas can be away. With fragments the missed rounds are those of any
    fragment, and an outlier limit would refuse what a replica brings back."""
    return keeps_late_work(settings) and settings.num_fragments == 1 and settings.outlier_z == 0


def late_replicas(
    view: RoundView, accepted: Sequence[ContributionRecord], refused: Sequence[Refusal]
) -> tuple[LateReplica, ...]:
    """Return the live replicas that work towards the round or an earlier one and are neither
    accepted nor refused, sorted; none if their work never arrives.

    A contribution without tokens is late too: its writer has worked for the round. A replica is
    away from the first round that it misses after :data:`STEADY_ROUNDS` until it contributes, or
    until more than :data:`MOST_AWAY` of the live replicas are late.
    """
    settings = view.settings
    if not keeps_late_work(settings):
        return ()
    decided = {record.replica for record in accepted} | {refusal.replica for refusal in refused}
    late = sorted((view.expected | set(view.contributions)) - decided)
    missed = {late.replica: late.missed for late in view.previous.late} if view.previous else {}
    known = _known_units(view.previous, settings.weighting)
    usual = statistics.fmean(
        units_of(record.tokens, record.rounds, settings.weighting) for record in accepted
    )
    away = _away(view, late, accepted=len(accepted))
    return tuple(
        LateReplica(
            replica=replica,
            units=known.get(replica, usual),
            missed=max(0, min(missed.get(replica, 0), MAX_COUNTED)) + 1,
            away=replica in away,
        )
        for replica in late
    )


def _away(view: RoundView, late: Sequence[int], *, accepted: int) -> frozenset[int]:
    """Return the late replicas that are away; none if the plan of the round before is unknown."""
    before = plan_before(view)
    are_few = len(late) <= MOST_AWAY * (len(late) + accepted)
    if before is None or not are_few or not can_be_away(view.settings):
        return frozenset()
    was_away = {late.replica: late.away for late in before.late}
    is_steady = before.steady_rounds >= STEADY_ROUNDS
    return frozenset(replica for replica in late if was_away.get(replica, is_steady))


def plan_before(view: RoundView) -> Plan | None:
    """Return the plan of the round before, if it is known."""
    previous = view.previous
    return previous if previous and previous.round == view.round - 1 else None


def steady_rounds(
    view: RoundView, accepted: Sequence[ContributionRecord], late: Sequence[LateReplica]
) -> int:
    """Return the number of rounds in a row, with this one, in which no replica became late or
    brought late work."""
    if any(replica.missed == 1 for replica in late) or any(r.rounds > 1 for r in accepted):
        return 0
    before = plan_before(view)
    return min(before.steady_rounds, MAX_COUNTED) + 1 if before else 1


def _known_units(previous: Plan | None, weighting: str) -> dict[int, float]:
    """Return the tokens per round of each replica in the previous plan, if they are possible; none
    with uniform weights, where all have the same."""
    if previous is None or weighting != "tokens":
        return {}
    known = {late.replica: late.units for late in previous.late}
    known |= {
        c.replica: units_of(c.tokens, max(1, c.rounds), weighting) for c in previous.contributions
    }
    return {replica: units for replica, units in known.items() if 0 < units <= MAX_COUNTED}


def room_of(late: LateReplica, settings: GroupSettings) -> float:
    """Return the weight of a late replica before division: that of a contribution in its first
    missed round of the fragment, and ``late_keep`` of the one before in each further round. None if
    it is away or has hung."""
    if late.away or late.missed > HUNG_AFTER:
        return 0.0
    missed_before = math.ceil(late.missed / settings.num_fragments) - 1
    return late.units * float(settings.late_keep**missed_before)


def weights_of(
    accepted: Sequence[ContributionRecord],
    late: Sequence[LateReplica],
    settings: GroupSettings,
    *,
    before: Plan | None,
) -> list[float]:
    """Return the weight of each accepted contribution; ``before`` is the plan of the round before,
    if it is known."""
    units = [units_of(record.tokens, record.rounds, settings.weighting) for record in accepted]
    total = sum(units) + sum(room_of(replica, settings) for replica in late)
    if can_be_away(settings):
        work = [_work_of(record, before, settings.late_keep) for record in accepted]
        total = max(total, sum(u * w for u, w in zip(units, work, strict=True)) / MOST_WORK)
    return [unit / total for unit in units]


def _work_of(record: ContributionRecord, before: Plan | None, late_keep: float) -> float:
    """Return how many rounds of work a contribution can hold in full: what its replica missed while
    it was away, or while it was in no plan; the shares of others are not counted."""
    if before:
        is_away = {late.replica: late.away for late in before.late}
        is_away |= {c.replica: False for c in before.contributions}
        if not is_away.get(record.replica, True):
            return 1
    most = max(HUNG_AFTER + 1, 1 / (1 - late_keep)) if late_keep < 1 else math.inf
    return min(record.rounds, most)
