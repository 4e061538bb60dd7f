"""Validation of bucket records: bounds, times and refusals.

Records come from machines that we do not control. They are checked before they reach the database.
A refused record is named in an event, counted on the run, and not read again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime

from django.db.models import F

from diloco.protocol.records import (
    BadRecord,
    CheckpointManifest,
    Commit,
    ContributionRecord,
    FinalManifest,
    Plan,
    Record,
)
from diloco.protocol.telemetry import PHASES, STARTUP_PHASES
from runs.ingest.limits import SECONDS_LIMIT, SMALL_LIMIT, count
from runs.models import Event, Replica, Run
from runs.times import from_wall
from runs.transitions import record_event

REFUSAL_EVENTS = 20
"""Events per run about unreadable records; later ones are only counted, if at all."""

PHASE_NAMES = frozenset({*STARTUP_PHASES, *PHASES, "other"})


def refuse(
    run: Run,
    what: str,
    error: BaseException,
    *,
    replica: Replica | None = None,
    passed: bool = False,
) -> None:
    """Count an unreadable record and record an event, once per ``what`` (its key).

    ``passed``: a cursor moves past the record, so it is met only once. Other records are met at
    every tick; beyond :data:`REFUSAL_EVENTS` they are not counted, because nothing distinguishes a
    known one from a new one.
    """
    known = Event.objects.filter(run=run, kind="refused", message__startswith=f"{what} refused")
    if known.exists():
        return
    is_named = Event.objects.filter(run=run, kind="refused").count() < REFUSAL_EVENTS
    if is_named or passed:
        Run.objects.filter(pk=run.pk).update(refused_records=F("refused_records") + 1)
    if is_named:
        record_event(
            run, "refused", f"{what} refused: {error}", level=Event.Level.WARNING, replica=replica
        )


def wall(value: float, now: datetime) -> datetime:
    """A display time; ``now`` if the writer's time is implausible."""
    return from_wall(value) or now


def seconds(phases: Mapping[str, float]) -> dict[str, float]:
    """The known phases, in seconds, clamped so that sums stay finite."""
    return {
        name: round(min(value, SECONDS_LIMIT), 6)
        for name, value in phases.items()
        if name in PHASE_NAMES and math.isfinite(value) and value >= 0
    }


def check_record(record: Record) -> None:
    """Raise :class:`BadRecord` for numbers that a table cannot hold."""
    match record:
        case Commit():
            _distinct((c.replica for c in record.contributors), "contributors")
            count(record.fragment, "fragment", limit=SMALL_LIMIT)
            count(record.tokens_total, "tokens_total")
        case Plan():
            _distinct((c.replica for c in record.contributions), "contributions")
            _distinct((c.replica for c in record.refused), "refused")
            for line in record.contributions:
                count(line.tokens, "tokens")
                count(line.steps, "steps", limit=SMALL_LIMIT)
                count(line.size_bytes, "size_bytes")
        case ContributionRecord():
            count(record.base_round, "base_round", limit=SMALL_LIMIT)
            count(record.tokens, "tokens")
            count(record.steps, "steps", limit=SMALL_LIMIT)
            count(record.size_bytes, "size_bytes")
        case CheckpointManifest() | FinalManifest():
            count(record.round, "round", limit=SMALL_LIMIT)
            count(record.weights.size_bytes, "size_bytes")
        case _:
            pass


def _distinct(replicas: Iterable[int], name: str) -> None:
    """Each replica can be in a round once; otherwise a record of a megabyte would create a hundred
    thousand rows."""
    numbers = list(replicas)
    if len(set(numbers)) != len(numbers):
        raise BadRecord(f"{name}: expected each replica once, found one of them twice")
