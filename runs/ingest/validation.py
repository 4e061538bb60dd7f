"""What reading a bucket's records into tables needs: bounds, times, refusals, what changed.

Records come from machines we do not control. They are checked here before they meet the database;
what is refused is named in an Event, counted on the run, and never read again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

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
from runs.ingest.limits import SECONDS_LIMIT, SMALL_LIMIT, count, is_wall_time
from runs.models import Event, Replica, Run
from runs.transitions import record_event

REFUSAL_EVENTS = 20
"""Events per run about unreadable records; beyond that they are at most counted."""

PHASE_NAMES = frozenset({*STARTUP_PHASES, *PHASES, "other"})


def refuse(
    run: Run,
    what: str,
    error: BaseException,
    *,
    replica: Replica | None = None,
    passed: bool = False,
) -> None:
    """Count an unreadable record and name it, once per ``what`` (its key).

    ``passed``: a cursor leaves it behind. Others are met again at every tick, and past
    :data:`REFUSAL_EVENTS`, when nothing tells them from new ones, they are not counted.
    """
    known = Event.objects.filter(run=run, kind="refused", message__startswith=f"{what} refused")
    if known.exists():
        return
    named = Event.objects.filter(run=run, kind="refused").count() < REFUSAL_EVENTS
    if named or passed:
        Run.objects.filter(pk=run.pk).update(refused_records=F("refused_records") + 1)
    if named:
        record_event(
            run, "refused", f"{what} refused: {error}", level=Event.Level.WARNING, replica=replica
        )


def wall(value: float, now: datetime) -> datetime:
    """A label for people; ours where the writer's makes no sense."""
    return datetime.fromtimestamp(value, tz=UTC) if is_wall_time(value) else now


def seconds(phases: Mapping[str, float]) -> dict[str, float]:
    """The phases we know, as seconds of which sums are finite."""
    return {
        name: round(min(value, SECONDS_LIMIT), 6)
        for name, value in phases.items()
        if name in PHASE_NAMES and math.isfinite(value) and value >= 0
    }


def check_record(record: Record) -> None:
    """Numbers that a table cannot hold are refused before anything is stored."""
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
    """A replica is in a round once, or a record of a megabyte would be a hundred thousand rows."""
    found = list(replicas)
    if len(set(found)) != len(found):
        raise BadRecord(f"{name}: expected each replica once, found one of them twice")
