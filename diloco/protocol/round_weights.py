"""The weights of a round's contributions: late work enters once, now or later. Pure functions.

Every round of work of every live replica enters the global weights once, with the weight of one
replica, in this round or in a later one. So the weights of a round are divided among *all* live
replicas: with A the accepted contributions and L the late replicas,

    D = sum of u over A and L,    w_i = u_i / D,    u = 1 (uniform) or tokens per round of work

and they sum to less than one while a replica is late. Its contribution holds several rounds of work
once it arrives, and has the same ``w``: a mean over those present would count late work twice, once
by the larger weights of the others and once when it arrives.

A replica that was late keeps the share ``late_keep`` of its progress
(:meth:`diloco.training.local_progress.LocalProgress.apply`), so it carries at most
``1 / (1 - late_keep)`` rounds of work. With 0 it carries none, and D counts A alone.

- Fragments: the rule holds for each fragment by itself, whose base and rounds of work are its own.
- Overlap: the steps after the contributed snapshot were not missed; they are kept whole.
- Top-k with error feedback: the residual is work that a round has included; it stays as it is.
- RDA: directions are normalised, lengths are summed with ``w``, which shortens the mean alike.
- Dynamic local updates: a round of work is a round of any number of steps.
- A fixed world size: the contributors fill all places; D counts A alone.
"""

from __future__ import annotations

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
beats, but does not work."""


def units_of(tokens: int, rounds: int, weighting: str) -> float:
    """Return the weight of a contribution before division by that of all live replicas."""
    return tokens / rounds if weighting == "tokens" else 1.0


def kept_when_late(settings: GroupSettings) -> float:
    """Return the share of its progress that a late replica keeps for a later round: none with
    spares, whose weights leave no room for it (:func:`late_replicas`)."""
    return 0.0 if settings.world_size_mode == "fixed_with_spares" else settings.late_keep


def late_replicas(
    view: RoundView, accepted: Sequence[ContributionRecord], refused: Sequence[Refusal]
) -> tuple[LateReplica, ...]:
    """Return the live replicas that work towards the round or an earlier one and are neither
    accepted nor refused, sorted; none if their work never arrives.

    A contribution without tokens is late too: its writer has worked for the round.
    """
    settings = view.settings
    if kept_when_late(settings) == 0:
        return ()
    decided = {record.replica for record in accepted} | {refusal.replica for refusal in refused}
    missed = {late.replica: late.missed for late in view.previous.late} if view.previous else {}
    known = _known_units(view.previous, settings.weighting)
    usual = statistics.fmean(
        units_of(record.tokens, record.rounds, settings.weighting) for record in accepted
    )
    return tuple(
        LateReplica(
            replica=replica,
            units=known.get(replica, usual),
            missed=max(0, min(missed.get(replica, 0), MAX_COUNTED)) + 1,
        )
        for replica in sorted((view.expected | set(view.contributions)) - decided)
    )


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


def weights_of(
    accepted: Sequence[ContributionRecord], late: Sequence[LateReplica], weighting: str
) -> list[float]:
    """Return the weight of each accepted contribution. Replicas that have hung get no room."""
    units = [units_of(record.tokens, record.rounds, weighting) for record in accepted]
    room = sum(replica.units for replica in late if replica.missed <= HUNG_AFTER)
    total = sum(units) + room
    return [unit / total for unit in units]
