"""History of one replica: contributions to the newest rounds, phase times and the last traceback.

Each function makes a constant number of queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import Count

from executors.registry import DESCRIPTIONS
from runs.json_values import finite, iso, mapping
from runs.metrics import round_strips
from runs.metrics.round_strips import GROUPS
from runs.models import (
    Contribution,
    LogLine,
    QuarantinedRecord,
    Replica,
    ReplicaAttempt,
    Round,
)
from runs.states import ContributionState, RoundState

ROUNDS = 50
QUARANTINED = 50
"""Quarantined records that the page shows."""
STRIP_WIDTH = 1000.0
LINES = 2000
"""Newest log lines that are searched for a traceback; a replica can write millions."""
TRACEBACK = "Traceback (most recent call last)"


def console_url(handle: Mapping[str, Any] | None) -> str:
    """Where a person finds the job in the backend's own pages; '' for those that have none."""
    values = mapping(handle)
    backend = DESCRIPTIONS.get(str(values.get("backend")))
    return backend.job_url(mapping(values.get("data"))) if backend else ""


def round_history(replica: Replica) -> list[dict[str, Any]]:
    """The newest :data:`ROUNDS` rounds of the run, newest first. Two queries."""
    rounds = list(Round.objects.filter(run=replica.run).order_by("-number")[:ROUNDS])
    contributions = {
        c.round_id: c
        for c in Contribution.objects.filter(replica=replica, round_id__in=[r.pk for r in rounds])
    }
    return [_row(row, contributions.get(row.pk), replica.number) for row in rounds]


def _outcome(row: Round, c: Contribution | None, number: int) -> str:
    if c is not None:
        return str(c.state)
    if row.state == RoundState.COLLECTING:
        return "collecting"
    return "healing" if number in round_strips.healing(bytes(row.outcomes)) else "missing"


def _row(row: Round, c: Contribution | None, number: int) -> dict[str, Any]:
    phases = {} if c is None else c.phases or {}
    groups = {name: sum(float(phases.get(p, 0)) for p in ps) for name, ps in GROUPS.items()}
    outcome = _outcome(row, c, number)
    return {
        "number": row.number,
        "round_state": str(row.state),
        "outcome": outcome,
        "icon": {"uploaded": "uploading", "healing": "syncing"}.get(outcome, outcome),
        "why": _why(row, c, outcome),
        "late_s": round_strips.late_s(row, c) if c else None,
        "started_at": c.started_at if c else None,
        "steps": c.steps or None if c else None,
        "norm": finite(c.norm) if c else None,
        "wait_s": groups["wait"] if phases else None,
        "bytes_up": c.bytes_up if c else None,
        "bytes_down": c.bytes_down if c else None,
        "up_per_s": _rate(c.bytes_up, phases.get("upload")) if c else None,
        "down_per_s": _rate(c.bytes_down, phases.get("download")) if c else None,
        "groups": groups if sum(groups.values()) > 0 else {},
    }


def _why(row: Round, c: Contribution | None, outcome: str) -> str:
    if c is not None and c.reason:
        return c.reason
    if c is None:
        if outcome == "healing":
            return "it was catching up with the group"
        open_round = row.state in (RoundState.COLLECTING, RoundState.PLANNED)
        return "not uploaded yet" if open_round else "no upload reached the bucket in time"
    if c.state == ContributionState.LATE:
        return "committed without it"
    return row.reason if row.state == RoundState.VOID else ""


def _rate(size_bytes: int, seconds: Any) -> float | None:
    took_s = float(seconds or 0)
    return size_bytes / took_s if size_bytes and took_s > 0 else None


def tally(replica: Replica) -> dict[str, int]:
    """Contributions by state, and ``without``: committed rounds without one. One query."""
    rows = (
        Contribution.objects.filter(replica=replica)
        .order_by()
        .values_list("state")
        .annotate(Count("pk"))
    )
    counts = {str(state): int(count) for state, count in rows}
    known = sum(counts.get(s, 0) for s in ("included", "late", "refused"))
    return {**counts, "without": max(replica.run.committed_rounds - known, 0)}


def bandwidth(history: list[dict[str, Any]], way: str) -> float | None:
    """Mean bytes per second during transfers in ``history``; None without transfers.

    ``way`` is "up" or "down".
    """
    rows = [(row[f"bytes_{way}"], row[f"{way}_per_s"]) for row in history if row[f"{way}_per_s"]]
    took_s = sum(size / rate for size, rate in rows)
    return sum(size for size, _ in rows) / took_s if took_s else None


def phase_strip(history: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The rounds of ``history`` over wall time, as bars of a strip that is 1000 wide.

    None without timed rounds.
    """
    timed = [row for row in reversed(history) if row["groups"] and row["started_at"]]
    if not timed:
        return None
    ends = [row["started_at"].timestamp() + sum(row["groups"].values()) for row in timed]
    begun = timed[0]["started_at"].timestamp()
    scale = STRIP_WIDTH / max(max(ends) - begun, 1e-9)
    bars = []
    for row in timed:
        at = (row["started_at"].timestamp() - begun) * scale
        for name, seconds in row["groups"].items():
            if seconds > 0:
                width = seconds * scale
                bars.append(
                    {
                        "x": f"{at:.2f}",
                        "width": f"{width:.2f}",
                        "group": name,
                        "round": row["number"],
                        "seconds": seconds,
                    }
                )
                at += width
    totals = {name: sum(row["groups"][name] for row in timed) for name in GROUPS}
    whole = sum(totals.values())
    return {
        "bars": bars,
        "first": timed[0]["number"],
        "last": timed[-1]["number"],
        "from": iso(timed[0]["started_at"]),
        "shares": [
            {"group": name, "seconds": s, "share": s / whole} for name, s in totals.items() if s > 0
        ],
    }


def quarantined(replica: Replica) -> list[dict[str, Any]]:
    """Quarantined records of a replica, newest first. One query."""
    records = QuarantinedRecord.objects.filter(replica=replica, quarantined_at__isnull=False)
    return [
        {
            "key": r.key,
            "incarnation": r.incarnation,
            "size_bytes": r.size_bytes,
            "reason": r.reason,
            "failures": r.failures,
            "first_at": iso(r.first_at),
            "quarantined_at": iso(r.quarantined_at),
        }
        for r in records[:QUARANTINED]
    ]


def last_traceback(replica: Replica) -> dict[str, Any] | None:
    """The newest traceback of a replica.

    Searches the last :data:`LINES` log lines, then the backend's messages about ended attempts.
    """
    newest = LogLine.objects.filter(replica=replica).order_by("-id").values("pk")[:LINES]
    line = (
        LogLine.objects.filter(pk__in=newest, message__contains=TRACEBACK).order_by("-id").first()
    )
    if line is not None:
        return {"text": line.message, "at": iso(line.at), "source": "telemetry"}
    attempt = (
        ReplicaAttempt.objects.filter(replica=replica, message__contains="Traceback")
        .order_by("-number")
        .first()
    )
    if attempt is None:
        return None
    source = f"the backend, attempt {attempt.number}"
    return {"text": attempt.message, "at": iso(attempt.ended_at), "source": source}
