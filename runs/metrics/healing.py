"""Find the replicas that were healing in a round: live, but still syncing the group's state.

The start of a catch-up is an event of the run (the transition to ``syncing``); its end is not. A
replica therefore counts as healing in every round that closes after that event, until its next
event, or until it has contributed to a round (late and refused contributions included). An import
restores both events and rounds from the bucket, so it gets the same result.

A catch-up between two reads of the lease is missed; a round rarely closes within it. Events have
the server's clock and commits that of their writer, so the first or last round of a catch-up can be
wrong; so can the last round of a run, if an event is committed after it. No decision depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from runs.metrics import round_strips
from runs.models import Event, Replica, Round, Run
from runs.states import ReplicaState

Moves = Mapping[int, list[tuple[datetime, str]]]
"""Replica number -> (time, new state), in order."""


def mark(run: Run, rows: Iterable[Round]) -> list[int]:
    """Mark healing replicas in the strips of closed rounds, given in order, and save the changes;
    return the numbers of the changed rounds.

    The round before them is marked again, because an event can be committed after the round that
    followed it. At most four queries and one per changed round; two if every replica contributed.
    """
    rows = [row for row in rows if row.committed_at is not None]
    if not rows:
        return []
    numbers = sorted(Replica.objects.filter(run=run).values_list("number", flat=True))
    last = rows[0].number - 1
    earlier = {
        row.number: row for row in Round.objects.filter(run=run, number__in=(last - 1, last))
    }
    before = earlier.get(last)
    if before is not None and before.committed_at is not None and _absent(before, numbers):
        rows, before = [before, *rows], earlier.get(last - 1)
    absent = {n for row in rows for n in _absent(row, numbers)}
    moves = moves_of(run, absent) if absent else {}
    changed = []
    for row in rows if moves else ():
        healed = healing(row, before, moves, numbers)
        if healed != round_strips.healing(bytes(row.outcomes)):
            round_strips.heal(row, healed)
            row.save(update_fields=["outcomes", "timings"])
            changed.append(row.number)
        before = row
    return changed


def healing(row: Any, before: Any, moves: Moves, numbers: Iterable[int]) -> list[int]:
    """Replicas of ``numbers`` that heal in ``row``; ``before`` is the previous, marked round."""
    result = []
    for number in _absent(row, numbers):
        since = _syncing_since(moves.get(number, []), row.committed_at)
        if since is None:
            continue
        earlier = before is not None and before.committed_at and before.committed_at >= since
        if not earlier or number in round_strips.healing(bytes(before.outcomes)):
            result.append(number)
    return result


def moves_of(run: Run, numbers: Iterable[int]) -> Moves:
    """State changes of those replicas that ever caught up. One query."""
    moves: dict[int, list[tuple[datetime, str]]] = {}
    rows = (
        Event.objects.filter(run_id=run.pk, kind="replica_state", replica__number__in=set(numbers))
        .order_by("at", "id")
        .values_list("replica__number", "at", "to_state")
    )
    for number, at, to in rows:
        moves.setdefault(number, []).append((at, to))
    return {n: m for n, m in moves.items() if any(to == ReplicaState.SYNCING for _, to in m)}


def _absent(row: Any, numbers: Iterable[int]) -> list[int]:
    """Replicas without a contribution in the round."""
    outcomes = bytes(row.outcomes)
    return [n for n in numbers if n >= len(outcomes) or outcomes[n] in (0, round_strips.HEALING)]


def _syncing_since(moves: list[tuple[datetime, str]], at: datetime) -> datetime | None:
    """Start of the catch-up that is in progress at ``at``; None if there is none."""
    newest = None
    for when, to in moves:
        if when > at:
            break
        newest = when if to == ReplicaState.SYNCING else None
    return newest
