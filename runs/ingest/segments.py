"""Stores parsed telemetry segments as points, contributions, log lines and newest values.

Handles all replicas of a tick together, so the number of statements does not depend on their count.
Runs inside the transaction that moves the cursors (:mod:`runs.ingest.telemetry`). Adds what it
stored to ``changes`` for the live stream. If the transaction is rolled back, the exception also
ends the tick that owns ``changes``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np

from diloco.protocol.telemetry import MAX_LINE, Evaluation, Segment
from runs.bulk import update_rows
from runs.ingest.limits import finite, measured
from runs.ingest.round_reports import store_reports, wait_fraction
from runs.ingest.system_metrics import usage_points
from runs.ingest.validation import wall
from runs.metrics.blocks import BLOCK_STEPS, Points, concatenate
from runs.metrics.changes import Changes
from runs.metrics.downsampling import add_of_many, add_points
from runs.metrics.system_series import NEWEST
from runs.models import Event, LogLine, MetricBlock, Replica, Round, Run
from runs.models import TelemetryCursor as Cursor
from runs.redaction import clean_text
from runs.transitions import record_event

STEP_SERIES = ("loss", "lr", "grad_norm", "step_s")
RECENT_STEPS = 16
"""A replica's displayed loss is the mean over this many recent steps."""
RATE_WINDOW_S = 30.0


def store_segments(
    run: Run,
    segments_by_cursor: Sequence[tuple[Cursor, Sequence[Segment]]],
    *,
    now: datetime,
    changes: Changes,
) -> None:
    """``run`` must be locked: concurrent writers add to the same totals."""
    steps = [_step_points(segments) for _, segments in segments_by_cursor]
    points = [
        own | usage_points(segments)
        for own, (_, segments) in zip(steps, segments_by_cursor, strict=True)
    ]
    newest = add_of_many(run, _by_replica(segments_by_cursor, points), key="step")
    rows: list[tuple[Replica, dict[str, Any]]] = []
    for (cursor, segments), own in zip(segments_by_cursor, points, strict=True):
        replica = cursor.replica
        changes.points += [(series, replica.number, p) for series, p in own.items()]
        if "loss" in own:
            _check_losses(run, cursor, own["loss"])
        if cursor.incarnation < replica.incarnation:
            continue  # the last segments of an older process do not describe the newer one
        fields = _newest(own, newest.get(replica.pk, {}))
        reports = [r for s in segments for r in s.rounds]
        rows.append((replica, fields | wait_fraction(reports)))
        changes.replicas |= bool(fields)
    _store_newest(rows)
    sums: dict[str, Any] = {"last_seen_at": now}
    first = next((next(iter(own.values())) for own in steps if own), None)
    if first is not None and run.first_step_at is None:
        sums["first_step_at"] = wall(float(first.wall_s[0]), now)
    reports_by_cursor = [
        (cursor, [r for s in segments for r in s.rounds]) for cursor, segments in segments_by_cursor
    ]
    if any(reports for _, reports in reports_by_cursor):
        sums |= store_reports(run, reports_by_cursor, now=now, changes=changes)
    evaluations = [e for _, segments in segments_by_cursor for s in segments for e in s.evaluations]
    if evaluations:
        sums |= _store_evaluations(run, evaluations, changes)
    LogLine.objects.bulk_create(
        [
            LogLine(
                replica=cursor.replica,
                incarnation=cursor.incarnation,
                at=wall(line.wall_s, now),
                level=clean_text(line.level[:9], 8),
                message=clean_text(line.message[: MAX_LINE + 1]),
            )
            for cursor, segments in segments_by_cursor
            for segment in segments
            for line in segment.logs
        ]
    )
    Run.objects.filter(pk=run.pk).update(**sums)
    changes.run = True


def _by_replica(
    segments_by_cursor: Sequence[tuple[Cursor, Sequence[Segment]]],
    points: Sequence[dict[str, Points]],
) -> dict[int | None, dict[str, Points]]:
    """Merge points by replica. Points of a later process come after those of an earlier one."""
    parts: dict[int | None, dict[str, list[Points]]] = {}
    for (cursor, _), own in zip(segments_by_cursor, points, strict=True):
        for series, series_points in own.items():
            parts.setdefault(cursor.replica.pk, {}).setdefault(series, []).append(series_points)
    return {
        pk: {series: concatenate(series_points) for series, series_points in own.items()}
        for pk, own in parts.items()
    }


def _step_points(segments: Sequence[Segment]) -> dict[str, Points]:
    """The points of all segments by series name."""
    parts: dict[str, list[Points]] = {}
    for segment in segments:
        steps = segment.steps
        if not steps.step:
            continue
        axis = Points.of(
            step=steps.step,
            round=steps.round,
            tokens=steps.tokens,
            wall_s=steps.wall_s,
            value=steps.wall_s,
        )
        for series in STEP_SERIES:
            if column := getattr(steps, series):
                parts.setdefault(series, []).append(replace(axis, value=measured(column)))
    return {series: concatenate(series_points) for series, series_points in parts.items()}


def _newest(points: dict[str, Points], tails: dict[str, Points]) -> dict[str, Any]:
    """Columns of a replica's row, taken from its newest points."""
    fields: dict[str, Any] = {
        name: finite(float(points[name].value[-1])) for name in NEWEST if name in points
    }
    return fields | (_newest_step(tails["loss"]) if "loss" in points else {})


def _store_newest(rows: Sequence[tuple[Replica, dict[str, Any]]]) -> None:
    rows_by_columns: dict[tuple[str, ...], dict[int, list[Any]]] = {}
    for replica, fields in rows:
        if fields:
            rows_by_columns.setdefault(tuple(fields), {})[replica.pk] = list(fields.values())
        for name, value in fields.items():
            setattr(replica, name, value)
    for names, values in rows_by_columns.items():
        update_rows(Replica, names, values.items())


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
    """Throughput over the last :data:`RATE_WINDOW_S` seconds, waiting included; None if unknown."""
    recent = points.take(points.wall_s >= points.wall_s[-1] - RATE_WINDOW_S)
    if len(recent) < 2:
        return None
    took_s = float(recent.wall_s[-1] - recent.wall_s[0])
    tokens = int(recent.tokens[-1] - recent.tokens[0])
    return finite(tokens / took_s) if took_s > 0 and tokens >= 0 else None


def _check_losses(run: Run, cursor: Cursor, losses: Points) -> None:
    """Record one event per incarnation when a loss is not finite."""
    nonfinite = losses.take(~np.isfinite(losses.value))
    if len(nonfinite) and Cursor.objects.filter(pk=cursor.pk, nonfinite=False).update(
        nonfinite=True
    ):
        record_event(
            run,
            "nonfinite",
            f"expected a finite loss, found {float(nonfinite.value[0])} at step "
            f"{int(nonfinite.step[0])}",
            level=Event.Level.ERROR,
            replica=cursor.replica,
        )


def _store_evaluations(
    run: Run, evaluations: Sequence[Evaluation], changes: Changes
) -> dict[str, Any]:
    """Store the run's evaluation series by round. ``step`` is the steps of one replica so far."""
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
        value=measured(e.loss for e in ordered).tolist(),
    )
    add_points(run, None, {"eval_loss": points}, key="round")
    changes.points.append(("eval_loss", None, points))
    for number, group in itertools.groupby(ordered, key=lambda e: e.round):
        if number < 1:
            continue  # an evaluation of the initial weights, which belong to no round
        Round.objects.update_or_create(
            run=run, number=number, defaults={"eval_loss": finite(list(group)[-1].loss)}
        )
        changes.rounds.add(number)
    # Committed rounds only: an evaluation of a later round is shown after its commit.
    shown = [e for e in ordered if e.round < run.next_round and finite(e.loss) is not None]
    if not shown or shown[-1].round < run.eval_round:
        return {}
    return {"eval_loss": shown[-1].loss, "eval_round": shown[-1].round}


def date_evaluation(run: Run, number: int, tokens: int) -> None:
    """Correct the token count of an evaluation that was read before its round's commit."""
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
