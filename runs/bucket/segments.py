"""What one incarnation's segments say, into points, contributions, log lines and the newest values.

Called inside the transaction that moves the cursor (:mod:`runs.bucket.ingest`); adds what it stored
to ``changes`` so that the live stream can repeat it. A transaction that is rolled back raises, and
the tick that made ``changes`` ends with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np
from django.db.models import F

from diloco.rendezvous.telemetry import Evaluation, RoundReport, Segment
from runs.bucket.reading import Changes, finite, seconds, wall
from runs.bucket.usage import NEWEST, usage_points
from runs.models import Contribution, Event, LogLine, MetricBlock, Replica, Round, Run
from runs.models import TelemetryCursor as Cursor
from runs.series import strips
from runs.series.blocks import BLOCK_STEPS, Points, concatenate
from runs.series.rollups import add_points
from runs.states import ContributionState
from runs.transitions import clean_text, record_event

STEP_SERIES = ("loss", "lr", "grad_norm", "step_s")
RECENT_STEPS = 16
"""A replica's displayed loss is the mean of its last so many steps."""
MISSES = 3
"""Rounds in a row without a replica that are worth an event."""
RATE_WINDOW_S = 30.0

_OUTCOMES = {
    "included": ContributionState.INCLUDED,
    "late": ContributionState.LATE,
    "void": ContributionState.LATE,
}


def store_segments(
    run: Run, cursor: Cursor, segments: Sequence[Segment], *, now: datetime, changes: Changes
) -> None:
    replica = cursor.replica
    # Several replicas' batches may be stored at once by a second worker: the run's sums are theirs.
    locked = Run.objects.select_for_update().get(pk=run.pk)
    sums: dict[str, Any] = {"last_seen_at": now}
    steps = _step_points(segments)
    points = steps | usage_points(segments)
    if points:
        _store_newest(locked, replica, cursor, points, changes)
    if steps and locked.first_step_at is None:
        first = next(iter(steps.values()))
        sums["first_step_at"] = wall(float(first.wall_s[0]), now)
    reports = [r for s in segments for r in s.rounds]
    if reports:
        sums |= _store_reports(locked, replica, cursor, reports, now, changes)
    evaluations = [e for s in segments for e in s.evaluations]
    if evaluations:
        sums |= _store_evaluations(locked, evaluations, changes)
    LogLine.objects.bulk_create(
        [
            LogLine(
                replica=replica,
                incarnation=cursor.incarnation,
                at=wall(line.wall_s, now),
                level=clean_text(line.level, 8),
                message=clean_text(line.message),
            )
            for segment in segments
            for line in segment.logs
        ]
    )
    Run.objects.filter(pk=run.pk).update(**sums)
    changes.run = True


def _step_points(segments: Sequence[Segment]) -> dict[str, Points]:
    """Series name -> its points, of all segments together."""
    parts: dict[str, list[Points]] = {}
    for segment in segments:
        steps = segment.steps
        for series in STEP_SERIES:
            values = getattr(steps, series)
            if values:
                parts.setdefault(series, []).append(
                    Points.of(
                        step=steps.step,
                        round=steps.round,
                        tokens=steps.tokens,
                        wall_s=steps.wall_s,
                        value=values,
                    )
                )
    return {series: concatenate(found) for series, found in parts.items()}


def _store_newest(
    run: Run, replica: Replica, cursor: Cursor, points: dict[str, Points], changes: Changes
) -> None:
    newest = add_points(run, replica, points, key="step")
    changes.points += [(series, replica.number, p) for series, p in points.items()]
    if "loss" in newest:
        _watch_losses(run, replica, cursor, points["loss"])
    if cursor.incarnation < replica.incarnation:
        return  # an older process' last words do not describe the newer one
    fields = {name: finite(float(points[name].value[-1])) for name in NEWEST if name in points}
    if "loss" in newest:
        fields |= _newest_step(newest["loss"])
    if not fields:
        return
    Replica.objects.filter(pk=replica.pk).update(**fields)
    for name, value in fields.items():
        setattr(replica, name, value)
    changes.replicas = True


def _newest_step(tail: Points) -> dict[str, Any]:
    recent = [v for v in tail.value[-RECENT_STEPS:].tolist() if math.isfinite(v)]
    fields: dict[str, Any] = {
        "step": int(tail.step[-1]),
        "round": int(tail.round[-1]),
        "tokens": int(tail.tokens[-1]),
        "loss": sum(recent) / len(recent) if recent else None,
    }
    rate = tokens_per_s(tail)
    if rate is not None:
        fields["tokens_per_s"] = rate
    return fields


def tokens_per_s(points: Points) -> float | None:
    """Pace over the last :data:`RATE_WINDOW_S` seconds, waiting included; None if unknown."""
    recent = points.take(points.wall_s >= points.wall_s[-1] - RATE_WINDOW_S)
    if len(recent) < 2:
        return None
    took_s = float(recent.wall_s[-1] - recent.wall_s[0])
    tokens = int(recent.tokens[-1] - recent.tokens[0])
    return finite(tokens / took_s) if took_s > 0 and tokens >= 0 else None


def _watch_losses(run: Run, replica: Replica, cursor: Cursor, losses: Points) -> None:
    """One alarm per incarnation when a loss stops being a number."""
    for step, value in zip(losses.step.tolist(), losses.value.tolist(), strict=True):
        if not math.isfinite(value):
            if Cursor.objects.filter(pk=cursor.pk, nonfinite=False).update(nonfinite=True):
                record_event(
                    run, "nonfinite", f"expected a finite loss, found {value} at step {step}",
                    level=Event.Level.ERROR, replica=replica,
                )  # fmt: skip
            return


def _store_reports(
    run: Run,
    replica: Replica,
    cursor: Cursor,
    reports: Sequence[RoundReport],
    now: datetime,
    changes: Changes,
) -> dict[str, Any]:
    """Phase timings and digests of finished rounds; the run's sums, to be stored by the caller."""
    totals = {str(k): float(v) for k, v in run.phase_s.items()}
    rows: dict[int, Round] = {}
    for report in reports:
        phases = seconds(report.phases)
        for name, value in phases.items():
            totals[name] = round(totals.get(name, 0.0) + value, 6)
        if report.round < 1:
            continue
        row, _ = Round.objects.select_for_update().get_or_create(run=run, number=report.round)
        _store_report(row, replica, cursor, report, phases, now)
        rows[row.number] = row
        _compare_digest(run, row, replica, report.weights_digest)
        if report.outcome == "late":
            _alert_of_misses(run, replica, report.round)
        changes.rounds.add(report.round)
    curves = strips.curves(run, list(rows.values()))
    add_points(run, None, curves, key="round")
    changes.points += [(name, None, points) for name, points in curves.items()]
    if cursor.incarnation >= replica.incarnation:
        last = seconds(reports[-1].phases)
        total = sum(last.values())
        if total > 0:
            replica.wait_fraction = round(last.get("wait", 0.0) / total, 4)
            Replica.objects.filter(pk=replica.pk).update(wait_fraction=replica.wait_fraction)
    return {
        "phase_s": totals,
        "bytes_up": F("bytes_up") + sum(r.bytes_up for r in reports),
        "bytes_down": F("bytes_down") + sum(r.bytes_down for r in reports),
    }


def _store_report(
    row: Round,
    replica: Replica,
    cursor: Cursor,
    report: RoundReport,
    phases: dict[str, float],
    now: datetime,
) -> None:
    contribution, created = Contribution.objects.get_or_create(
        round=row,
        replica=replica,
        defaults={
            "incarnation": cursor.incarnation,
            "state": _OUTCOMES.get(report.outcome, ContributionState.LATE),
        },
    )
    if not created and contribution.incarnation != cursor.incarnation:
        return  # the round was made by another process of this replica
    if contribution.state == ContributionState.UPLOADED:
        contribution.state = _OUTCOMES.get(report.outcome, ContributionState.LATE)
    contribution.update_norm = finite(report.update_norm)
    if contribution.norm is None:
        contribution.norm = finite(report.norm)
    contribution.bytes_up = report.bytes_up
    contribution.bytes_down = report.bytes_down
    contribution.requests = report.requests
    contribution.phases = phases
    contribution.started_at = wall(report.started_wall_s, now)
    contribution.committed_at = wall(report.committed_wall_s, now)
    contribution.weights_digest = clean_text(report.weights_digest, 64)
    contribution.save()
    strips.put(row, [(replica.number, contribution)])
    row.save(update_fields=["outcomes", "timings", "lateness"])


def _alert_of_misses(run: Run, replica: Replica, round: int) -> None:
    """A live replica that its group goes on without is an alarm of its own: liveness is not
    participation. Told once, when the number is reached."""
    states = list(
        Contribution.objects.filter(replica=replica, round__number__lte=round)
        .order_by("-round__number")
        .values_list("state", flat=True)[: MISSES + 1]
    )
    missed = [state == ContributionState.LATE for state in states]
    if len(missed) >= MISSES and all(missed[:MISSES]) and not all(missed[MISSES:] or [False]):
        record_event(
            run, "replica_missed",
            f"{MISSES} rounds in a row, up to round {round}, were committed without {replica}",
            level=Event.Level.WARNING, replica=replica,
        )  # fmt: skip


def _compare_digest(run: Run, row: Round, replica: Replica, digest: str) -> None:
    """All replicas must hold the same global weights after a round (invariant I3)."""
    digest = clean_text(digest, 64)
    if not digest:
        return
    rows = Round.objects.filter(pk=row.pk)
    if rows.filter(weights_digest="").update(weights_digest=digest):
        return
    expected = rows.values_list("weights_digest", flat=True).get()
    if expected != digest and rows.filter(digest_mismatch=False).update(digest_mismatch=True):
        record_event(
            run, "weights_mismatch",
            f"weights after round {row.number} differ: expected digest {expected} as the others "
            f"have, found {digest} on {replica}",
            level=Event.Level.ERROR, replica=replica,
        )  # fmt: skip


def _store_evaluations(
    run: Run, evaluations: Sequence[Evaluation], changes: Changes
) -> dict[str, Any]:
    """The run's own series, filed by round: step is what one replica has taken until then."""
    sync_every = int(run.group_settings["sync_every"])
    tokens = dict(
        Round.objects.filter(run=run, number__in=[e.round for e in evaluations]).values_list(
            "number", "tokens_total"
        )
    )
    ordered = sorted(evaluations, key=lambda e: e.round)
    points = Points.of(
        step=[e.round * sync_every for e in ordered],
        round=[e.round for e in ordered],
        tokens=[tokens.get(e.round) or (run.tokens if e.round else 0) for e in ordered],
        wall_s=[e.wall_s for e in ordered],
        value=[e.loss for e in ordered],
    )
    add_points(run, None, {"eval_loss": points}, key="round")
    changes.points.append(("eval_loss", None, points))
    for number, group in itertools.groupby(ordered, key=lambda e: e.round):
        if number < 1:
            continue  # of the weights before the first round, which has no row
        Round.objects.update_or_create(
            run=run, number=number, defaults={"eval_loss": finite(list(group)[-1].loss)}
        )
        changes.rounds.add(number)
    newest = ordered[-1]
    if newest.round < run.eval_round or not math.isfinite(newest.loss):
        return {}
    return {"eval_loss": newest.loss, "eval_round": newest.round}


def date_evaluation(run: Run, number: int, tokens: int) -> None:
    """The tokens of a round whose evaluation was read before its commit."""
    row = MetricBlock.objects.filter(
        run=run, replica=None, series="eval_loss", level=0, index=number // BLOCK_STEPS
    ).first()
    if row is None:
        return
    points = Points.unpack(bytes(row.data))
    point = points.take(points.round == number)
    if len(point) and int(point.tokens[0]) != tokens:
        point = replace(point, tokens=np.full_like(point.tokens, tokens))
        add_points(run, None, {"eval_loss": point}, key="round")
