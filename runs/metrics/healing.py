"""Who was healing in a round: there, and still taking the group's state, so that it gave nothing.

That a replica begins to catch up is an event of the run (to ``syncing``); that it is done is none,
it goes on to other work. So it heals in every round that closes from its event on, until another
event of it or until it has given to one, late and refused work included. Events and rounds are both
found again in the bucket, so an import comes to the same.

Left out: a catch-up that was over between two looks at the lease; no round is likely to close in
it. An event is dated by our clock and a commit by its writer's, so the first or last round of a
catch-up may be told wrongly; nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from runs.metrics import round_strips
from runs.models import Event, Replica, Round, Run
from runs.states import ReplicaState

Moves = Mapping[int, list[tuple[datetime, str]]]
"""Replica number -> (when, to which state), in order."""


def mark(run: Run, rows: Iterable[Round]) -> None:
    """Note in the strips of closed rounds, given in order, who was healing, and save what changes.

    At most three queries and one per round that changes; one where nobody is missing.
    """
    numbers = sorted(Replica.objects.filter(run=run).values_list("number", flat=True))
    rows = [row for row in rows if row.committed_at is not None]
    absent = {n for row in rows for n in _absent(row, numbers)}
    if not absent:
        return
    moves = moves_of(run, absent)
    if not moves:
        return
    before = Round.objects.filter(run=run, number=rows[0].number - 1).first()
    for row in rows:
        found = healing(row, before, moves, numbers)
        if found:
            round_strips.heal(row, found)
            row.save(update_fields=["outcomes", "timings"])
        before = row


def healing(row: Any, before: Any, moves: Moves, numbers: Iterable[int]) -> list[int]:
    """Replicas of ``numbers`` that heal in ``row``; ``before`` is the round before it, marked."""
    found = []
    for number in _absent(row, numbers):
        came = _came(moves.get(number, []), row.committed_at)
        if came is None:
            continue
        earlier = before is not None and before.committed_at and before.committed_at >= came
        if not earlier or number in round_strips.healing(bytes(before.outcomes)):
            found.append(number)
    return found


def moves_of(run: Run, numbers: Iterable[int], *, events: Any = Event.objects) -> Moves:
    """Changes of state of those replicas that ever had to catch up. One query."""
    found: dict[int, list[tuple[datetime, str]]] = {}
    rows = (
        events.filter(run_id=run.pk, kind="replica_state", replica__number__in=set(numbers))
        .order_by("at", "id")
        .values_list("replica__number", "at", "to_state")
    )
    for number, at, to in rows:
        found.setdefault(number, []).append((at, to))
    return {n: m for n, m in found.items() if any(to == ReplicaState.SYNCING for _, to in m)}


def _absent(row: Any, numbers: Iterable[int]) -> list[int]:
    """Replicas without a contribution. Bytes of the strip, as they are stored."""
    outcomes = bytes(row.outcomes)
    return [n for n in numbers if n >= len(outcomes) or outcomes[n] in (0, round_strips.HEALING)]


def _came(moves: list[tuple[datetime, str]], at: datetime) -> datetime | None:
    """When the catch-up began that goes on at ``at``; None if none does."""
    newest = None
    for when, to in moves:
        if when > at:
            break
        newest = when if to == ReplicaState.SYNCING else None
    return newest
