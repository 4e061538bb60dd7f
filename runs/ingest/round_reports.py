"""Stores the replicas' reports of finished rounds in rounds and contributions.

Handles all replicas of a tick together, inside the transaction of :mod:`runs.ingest.segments`. The
number of statements is constant, apart from alerts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from diloco.protocol.telemetry import RoundReport
from runs.bulk import update_rows
from runs.ingest.limits import TOTAL_SECONDS_LIMIT, add, finite
from runs.ingest.validation import seconds, wall
from runs.metrics import round_strips
from runs.metrics.changes import Changes
from runs.metrics.downsampling import add_points
from runs.models import Contribution, Event, Replica, Round, Run
from runs.models import TelemetryCursor as Cursor
from runs.redaction import clean_text
from runs.states import ContributionState
from runs.transitions import record_event

MISSES = 3
"""Consecutive rounds without a replica that cause an event."""
ALERTS = 2_000
"""Late reports in one transaction that are checked for this."""

_OUTCOMES = {
    "included": ContributionState.INCLUDED,
    "late": ContributionState.LATE,
    "void": ContributionState.LATE,
}
_REPORTED = (
    "state",
    "norm",
    "update_norm",
    "cosine",
    "bytes_up",
    "bytes_down",
    "requests",
    "phases",
    "started_at",
    "committed_at",
    "weights_digest",
)
"""Columns of a contribution that a report sets."""
_ROUND = (*round_strips.STRIPS, "weights_digest", "digest_mismatch")

Reports = Sequence[tuple[Cursor, Sequence[RoundReport]]]


def store_reports(
    run: Run, reports_by_cursor: Reports, *, now: datetime, changes: Changes
) -> dict[str, Any]:
    """Store phase timings and digests of finished rounds; return the run's totals for the caller to
    store. ``run`` must have been locked before it was read."""
    reported = [
        (cursor, r) for cursor, reports in reports_by_cursor for r in reports if r.round >= 1
    ]
    rounds = _rounds(run, {report.round for _, report in reported})
    _store_contributions(reported, rounds, now)
    for cursor, report in reported:
        _compare_digest(run, rounds[report.round], cursor.replica, report.weights_digest)
    update_rows(Round, _ROUND, [(r.pk, [getattr(r, n) for n in _ROUND]) for r in rounds.values()])
    late = {(c.replica.pk, r.round): c.replica for c, r in reported if r.outcome == "late"}
    for (_, number), replica in sorted(late.items())[-ALERTS:]:
        _alert_of_misses(run, replica, number)
    changes.rounds |= set(rounds)
    curves = round_strips.curves(run, list(rounds.values()))
    add_points(run, None, curves, key="round")
    changes.points += [(name, None, points) for name, points in curves.items()]
    all_reports = [report for _, reports in reports_by_cursor for report in reports]
    totals = {str(k): float(v) for k, v in run.phase_s.items()}
    for report in all_reports:
        for name, value in seconds(report.phases).items():
            totals[name] = round(min(totals.get(name, 0.0) + value, TOTAL_SECONDS_LIMIT), 6)
    return {
        "phase_s": totals,
        "bytes_up": add(run.bytes_up, (r.bytes_up for r in all_reports)),
        "bytes_down": add(run.bytes_down, (r.bytes_down for r in all_reports)),
        "requests": add(run.requests, (r.requests for r in all_reports)),
    }


def wait_fraction(reports: Sequence[RoundReport]) -> dict[str, float]:
    """The fraction of its newest round that a replica waited, as a column to update."""
    last = seconds(reports[-1].phases) if reports else {}
    total = sum(last.values())
    return {"wait_fraction": round(last.get("wait", 0.0) / total, 4)} if total > 0 else {}


def _rounds(run: Run, numbers: Iterable[int]) -> dict[int, Round]:
    """Locked rows of these rounds; created if the commit is not ingested yet."""
    wanted = set(numbers)
    rows = Round.objects.select_for_update().filter(run=run, number__in=wanted).order_by("number")
    result = {row.number: row for row in rows}
    missing = sorted(wanted - set(result))
    if missing:
        created = [Round(run=run, number=number) for number in missing]
        Round.objects.bulk_create(created, ignore_conflicts=True)
        result = {row.number: row for row in rows.all()}
    return result


def _store_contributions(
    reported: Sequence[tuple[Cursor, RoundReport]], rounds: Mapping[int, Round], now: datetime
) -> None:
    created = {
        (rounds[report.round].pk, cursor.replica.pk): Contribution(
            round=rounds[report.round],
            replica=cursor.replica,
            incarnation=cursor.incarnation,
            state=_OUTCOMES.get(report.outcome, ContributionState.LATE),
        )
        for cursor, report in reversed(reported)  # the first process of a replica wins
    }
    replicas = {cursor.replica.pk: cursor.replica for cursor, _ in reported}
    rows = Contribution.objects.filter(
        round__in=[row.pk for row in rounds.values()], replica__in=list(replicas)
    )
    known = {(c.round_id, c.replica_id): c for c in rows}
    missing = [contribution for identity, contribution in created.items() if identity not in known]
    if missing:
        Contribution.objects.bulk_create(missing, ignore_conflicts=True)
        known = {(c.round_id, c.replica_id): c for c in rows.all()}
    changed: dict[int, Contribution] = {}
    entries: dict[int, list[tuple[int, Contribution]]] = {}
    for cursor, report in reported:
        contribution = known[rounds[report.round].pk, cursor.replica.pk]
        if contribution.incarnation != cursor.incarnation:
            continue  # another process of this replica made the round's contribution
        _report(contribution, report, now)
        changed[contribution.pk] = contribution
        entries.setdefault(report.round, []).append((cursor.replica.number, contribution))
    update_rows(
        Contribution,
        _REPORTED,
        [(pk, [getattr(c, name) for name in _REPORTED]) for pk, c in changed.items()],
    )
    for number, mine in entries.items():
        round_strips.put(rounds[number], mine)


def _report(contribution: Contribution, report: RoundReport, now: datetime) -> None:
    if contribution.state == ContributionState.UPLOADED:
        contribution.state = _OUTCOMES.get(report.outcome, ContributionState.LATE)
    contribution.update_norm = finite(report.update_norm)
    contribution.cosine = _cosine(report)
    if contribution.norm is None:
        contribution.norm = finite(report.norm)
    contribution.bytes_up = report.bytes_up
    contribution.bytes_down = report.bytes_down
    contribution.requests = report.requests
    contribution.phases = seconds(report.phases)
    contribution.started_at = wall(report.started_wall_s, now)
    contribution.committed_at = wall(report.committed_wall_s, now)
    contribution.weights_digest = clean_text(report.weights_digest, 64)


def _cosine(report: RoundReport) -> float | None:
    value = finite(report.cosine)
    return value if value is not None and abs(value) <= 1 else None


def _compare_digest(run: Run, row: Round, replica: Replica, digest: str) -> None:
    """All replicas must hold identical global weights after a round (invariant I3). The row is
    locked; the caller stores it."""
    digest = clean_text(digest, 64)
    if not digest:
        return
    if not row.weights_digest:
        row.weights_digest = digest
    if row.weights_digest != digest and not row.digest_mismatch:
        row.digest_mismatch = True
        record_event(
            run,
            "weights_mismatch",
            f"weights after round {row.number} differ: expected digest {row.weights_digest} as on "
            f"the other replicas, found {digest} on {replica}",
            level=Event.Level.ERROR,
            replica=replica,
        )


def _alert_of_misses(run: Run, replica: Replica, round: int) -> None:
    """Record an event when a live replica has missed :data:`MISSES` rounds in a row: a live replica
    does not necessarily participate. Recorded once per streak."""
    states = list(
        Contribution.objects.filter(replica=replica, round__number__lte=round)
        .order_by("-round__number")
        .values_list("state", flat=True)[: MISSES + 1]
    )
    missed = [state == ContributionState.LATE for state in states]
    if len(missed) >= MISSES and all(missed[:MISSES]) and not all(missed[MISSES:] or [False]):
        message = f"{MISSES} rounds in a row, up to round {round}, were committed without {replica}"
        known = Event.objects.filter(replica=replica, kind="replica_missed", message=message)
        if not known.exists():  # a replica can report the same round again
            record_event(run, "replica_missed", message, level=Event.Level.WARNING, replica=replica)
