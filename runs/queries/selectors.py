"""Queries of runs, and rows for JSON, shared by pages, API and live stream.

Every function makes a constant number of queries, whatever the number of replicas or rounds; a test
counts them. Times are ISO 8601 in UTC. Unknown values, and numbers that are not finite, are null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import Count, Exists, F, IntegerField, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce
from django.utils import timezone

from archipelago import rows
from runs.backends.health import is_stale
from runs.json_values import finite, json_value, mapping, row_of
from runs.metrics import charts, round_strips
from runs.metrics.blocks import Points
from runs.models import (
    Alert,
    Contribution,
    Event,
    IngestState,
    Journal,
    LogLine,
    Replica,
    ReplicaAttempt,
    ReplicaPool,
    Round,
    Run,
)
from runs.models import TelemetryCursor as Cursor
from runs.permissions import can_view
from runs.queries import rates, round_summaries
from runs.queries.compiled import CompiledOnce
from runs.queries.fleet import pool_rows, replica_rows
from runs.states import (
    REPLICA_ENDED,
    REPLICA_LIVE,
    RUN_ACTIVE,
    RUN_LIVE,
    ContributionState,
    RunState,
)

MAX_POINTS = 2000
SNAPSHOT_POINTS = 500
"""Points per series in a snapshot, fewer if there are many series. Windows have more points."""
ALL_POINTS = 100_000
"""Points of all series in a snapshot."""

ROUNDS_LIMIT = 2000
"""Rounds in one response, the newest."""
RESPONSE_CONTRIBUTIONS = 4000
"""Contributions in one response, which limits the rounds of runs with many replicas."""

JOURNAL_RETRY_CAP = timedelta(minutes=5)
"""The longest delay between retries of a failed journal write (:mod:`runs.ingest.journal`)."""

DRAIN_FOR = timedelta(hours=1)
"""Telemetry is still expected for this time after the end of a run or its latest telemetry."""


# Selection.


def runs_for(user: AbstractBaseUser | AnonymousUser) -> QuerySet[Run]:
    """The runs that a user can view, newest first, annotated for :func:`run_header`."""
    return _runs_with_header().all() if can_view(user) else Run.objects.none()


def listed_runs(user: AbstractBaseUser | AnonymousUser) -> QuerySet[Run]:
    """The same with the columns of the runs list alone, without owners. Any other is read by a
    query for each run, which a test refuses."""
    return _listed_runs().all() if can_view(user) else Run.objects.none()


def visible_runs(user: AbstractBaseUser | AnonymousUser) -> QuerySet[Run]:
    """The same without annotations, which take a third of the CPU time of a chart's request."""
    return Run.objects.all() if can_view(user) else Run.objects.none()


@cache
def _runs_with_header() -> QuerySet[Run]:
    """All runs, annotated; built once, because that takes longer than their query."""
    return with_header(Run.objects.all())


@cache
def _listed_runs() -> QuerySet[Run]:
    header = {field.name for field in fields(rows.RunHeader)}
    columns = header & {field.name for field in Run._meta.concrete_fields} - {"owner"}
    return (
        _runs_with_header()
        .select_related(None)
        .only(
            *(*columns, "group_settings", "phase_s", "round_s", "time_limit_s", "idle_s"),
            *("tags", "archived_at", "delete_requested_at"),
        )
    )


def with_header(runs: QuerySet[Run]) -> QuerySet[Run]:
    """Add the annotations that :func:`run_header` needs."""
    # Subqueries, because an aggregate over a join would group by every column and drop the
    # ordering of the model.
    live = Replica.objects.filter(run=OuterRef("pk"), state__in=REPLICA_LIVE).order_by()
    count = Subquery(live.values("run").annotate(count=Count("pk")).values("count"))
    alerts = Alert.objects.filter(run=OuterRef("pk"), closed_at=None, acknowledged_at=None)
    waiting = alerts.order_by().values("run").annotate(count=Count("pk")).values("count")
    pools = ReplicaPool.objects.filter(run=OuterRef("pk")).order_by()
    wanted = Subquery(pools.values("run").annotate(wanted=Sum("count")).values("wanted"))
    # A count, because PostgreSQL evaluates EXISTS for all runs at once by reading every attempt.
    attempts = rates.unpriced_attempts().filter(replica__run=OuterRef("pk"))
    unpriced = attempts.values("replica__run").annotate(count=Count("pk"))
    return runs.select_related("owner").annotate(
        owner_name=F("owner__username"),
        live_count=_count(count),
        alert_count=_count(Subquery(waiting)),
        wanted=_count(wanted),
        unpriced=_count(Subquery(unpriced.values("count"))),
        **rates.rate_columns(),
    )


def _count(number: Subquery) -> CompiledOnce:
    return CompiledOnce(Coalesce(number, 0), IntegerField())


def runs_to_reconcile() -> QuerySet[Run]:
    """Runs that need control or ingest.

    These are active runs, and ended or paused runs with a job that can still run, a replica to
    release, unread telemetry, a pending ingest pass, a pending journal write, or a pending alert
    about their end. A run that its sweep holds needs none.
    """
    jobs = ReplicaAttempt.objects.filter(replica__run=OuterRef("pk"), ended_at=None)
    unread = Cursor.objects.filter(replica__run=OuterRef("pk"), ended=False)
    unpassed = IngestState.objects.filter(run=OuterRef("pk"), complete_pass__lt=F("wanted_pass"))
    waiting = Replica.objects.filter(run=OuterRef("pk")).exclude(state__in=REPLICA_ENDED)
    paused = Q(state=RunState.PAUSED)
    now = timezone.now()
    # After a failed write, but not longer than any retry delay, in case the clock was set back.
    delayed = Q(retry_at__gt=now, retry_at__lt=now + 2 * JOURNAL_RETRY_CAP)
    unwritten = Journal.objects.filter(run=OuterRef("pk"), due=True).exclude(delayed)
    then = now - DRAIN_FOR
    recent = Q(ended_at__gte=then) | Q(paused, state_since__gte=then) | Q(last_seen_at__gte=then)
    return Run.objects.filter(
        Q(state__in=RUN_ACTIVE)
        | Q(recent & (Exists(unread) | Exists(unpassed)))
        | Q(Exists(jobs))
        | Q(~paused & Exists(waiting))
        | Q(Exists(unwritten))
        | Q(end_due=True),
        ~Q(state=RunState.QUEUED, sweep_held=True),
    ).order_by("created_at")


def runs_to_delete() -> QuerySet[Run]:
    """Runs whose deletion was requested a while ago and has not completed."""
    a_while_ago = timezone.now() - timedelta(minutes=5)
    return Run.objects.filter(delete_requested_at__lt=a_while_ago)


# Rows.


def run_header(run: Run) -> dict[str, Any]:
    """Summary of a run. Makes no query for a run from :func:`runs_for`.

    Pace and remaining time hold only at present: they are null for a run without recent data.
    """
    if not hasattr(run, "live_count"):
        run = with_header(Run.objects.filter(pk=run.pk)).get()
    annotated: Any = run  # the model lacks the annotations of with_header
    now = timezone.now()
    current = run.state in RUN_LIVE and not is_stale(run, now=now)
    return row_of(
        rows.RunHeader,
        run,
        id=str(run.pk),
        owner=annotated.owner_name,
        tokens_per_s=finite(run.tokens_per_s) if current else None,
        live=annotated.live_count,
        alerts=annotated.alert_count,
        quorum=run.setting("min_quorum"),
        target=annotated.wanted or run.setting("num_replicas"),
        total_rounds=run.setting("total_rounds"),
        eta_s=eta_s(run, now=now) if current and run.state != RunState.STALLED else None,
        goodput=goodput(run.phase_s),
        cost_known=not annotated.unpriced,
        usd_h=finite(annotated.usd_h),
        usd_h_known=not annotated.unpriced_jobs,
    )


def eta_s(run: Run, *, now: datetime) -> float | None:
    """Estimated seconds to the end at the recent pace: by rounds, or by tokens or the time limit if
    sooner."""
    if run.round_s is None:
        return None
    rounds = max(run.total_rounds - run.committed_rounds, 0)
    limit = run.setting("max_tokens")
    if limit and run.tokens and run.committed_rounds:
        per_round = run.tokens / run.committed_rounds
        rounds = min(rounds, math.ceil(max(limit - run.tokens, 0) / per_round))
    left_s = rounds * run.round_s
    if run.time_limit_s:
        age_s = (now - (run.started_at or run.created_at)).total_seconds() - run.idle_s
        left_s = min(left_s, max(run.time_limit_s - age_s, 0.0))
    return round(left_s, 1)


def goodput(phase_s: Mapping[str, Any]) -> float | None:
    """Share of compute in the time of all phases of all rounds; None before the first round."""
    total = compute = 0.0
    for name, s in mapping(phase_s).items():
        if isinstance(s, (int, float)) and math.isfinite(s):
            total += s
            compute += s if name == "compute" else 0.0
    return round(compute / total, 4) if total > 0 and math.isfinite(total) else None


def round_rows(run: Run, *, numbers: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """Rows of the newest :data:`ROUNDS_LIMIT` rounds, or of those of ``numbers``, oldest first."""
    rounds = Round.objects.filter(run=run)
    if numbers is not None:
        rounds = rounds.filter(number__in=list(numbers))
    newest = list(rounds.order_by("-number")[:ROUNDS_LIMIT])
    contributions = _contribution_rows(newest)
    return [
        row_of(
            rows.Round,
            r,
            healing=round_strips.healing(bytes(r.outcomes)),
            contributions=contributions.get(r.pk, []),
        )
        for r in reversed(newest)
    ]


def _contribution_rows(rounds: Iterable[Round]) -> dict[int, list[dict[str, Any]]]:
    """Rows of contributions by the key of their round, in the order of the replicas.

    A response has thousands, and building their models would take most of its time.
    """
    round_of = {r.pk: r for r in rounds}
    found: dict[int, list[dict[str, Any]]] = {}
    names = [f.name for f in fields(rows.Contribution) if f.name not in ("replica", "late_s")]
    columns = Contribution.objects.filter(round__in=round_of).order_by("replica__number")
    for values in columns.values(*names, "round_id", "replica__number", "uploaded_at"):
        key = values.pop("round_id")
        number, uploaded_at = values.pop("replica__number"), values.pop("uploaded_at")
        late = None
        if values["state"] == ContributionState.LATE:
            late = round_strips.late_s(
                round_of[key], SimpleNamespace(**values, uploaded_at=uploaded_at)
            )
        row = {name: json_value(value) for name, value in values.items()}
        found.setdefault(key, []).append({"replica": number, "late_s": late, **row})
    return found


def event_rows(run: Run, after_id: int = 0, limit: int = 100) -> list[dict[str, Any]]:
    """The newest ``limit`` events after ``after_id``, newest first."""
    return [event_row(e) for e in events_of(run, after_id).order_by("-id")[:limit]]


def events_of(run: Run, after_id: int) -> QuerySet[Event]:
    """Events of a run after ``after_id``, with the relations that :func:`event_row` needs."""
    return Event.objects.filter(run=run, id__gt=after_id).select_related("replica", "actor")


def event_row(e: Event) -> dict[str, Any]:
    return row_of(
        rows.Event,
        e,
        replica=e.replica.number if e.replica else None,
        actor=e.actor.get_username() if e.actor else None,
    )


LOG_LEVELS = {
    "warning": ("warning", "error", "critical"),
    "error": ("error", "critical"),
}


def log_rows(
    run: Run,
    *,
    replica: int | None = None,
    after_id: int = 0,
    limit: int = 500,
    search: str = "",
    level: str = "",
    around: int | None = None,
) -> list[dict[str, Any]]:
    """Rows of log lines, oldest first.

    Args:
        replica: only lines of this replica.
        after_id: only lines after this ID.
        limit: only this many of the newest lines.
        search: only lines that contain this text.
        level: one of :data:`LOG_LEVELS`: only lines of this level or worse.
        around: instead of the newest lines, those before and after the line with this ID.
    """
    lines = lines_of(run, replica=replica, search=search, least=level).filter(id__gt=after_id)
    if around is None:
        shown = list(lines.order_by("-id")[:limit])[::-1]
    else:
        before = lines.filter(id__lte=around).order_by("-id")[: limit // 2]
        shown = [*list(before)[::-1], *lines.filter(id__gt=around).order_by("id")[: limit // 2]]
    return [log_row(line) for line in shown]


def lines_of(run: Run, *, replica: int | None, search: str, least: str = "") -> QuerySet[LogLine]:
    """Log lines of a run, or of one replica, that contain a text and have the level ``least``
    (one of :data:`LOG_LEVELS`) or a worse one."""
    lines = LogLine.objects.filter(replica__run=run).select_related("replica")
    if replica is not None:
        lines = lines.filter(replica__number=replica)
    if least in LOG_LEVELS:
        names = LOG_LEVELS[least]
        lines = lines.filter(level__in=[*names, *(name.upper() for name in names)])
    return lines.filter(message__icontains=search) if search else lines


def log_row(line: LogLine) -> dict[str, Any]:
    """The row of a log line, whose replica must be loaded."""
    return row_of(rows.LogLine, line, replica=line.replica.number)


def points(
    run: Run,
    series: str,
    *,
    replica: int | None = None,
    after_step: int = -1,
    max_points: int = MAX_POINTS,
) -> dict[str, Any]:
    """Columns of one series after ``after_step``, downsampled to ``max_points``."""
    low = after_step + 1 if after_step >= 0 else None
    window = charts.Window(low=low, max_points=max_points)
    total, kept = 0, Points.empty()
    for curve in charts.read(run, [(series, replica)], window):
        total, kept = curve.total, curve.points.take(curve.points.step > after_step)
    return kept.to_json(series=series, replica=replica, total=max(total, len(kept)))


def series_of(run: Run) -> list[tuple[str, int | None]]:
    """The (series, replica number or None) pairs that have points."""
    return charts.names_of(run)


def all_points(run: Run) -> list[dict[str, Any]]:
    """Columns of every series of the run, in a constant number of queries."""
    names = series_of(run)
    each = max(min(SNAPSHOT_POINTS, ALL_POINTS // max(len(names), 1)), 8)
    curves = charts.read(run, names, charts.Window(max_points=each))
    return [c.points.to_json(series=c.series, replica=c.owner, total=c.total) for c in curves]


def snapshot(run: Run, *, curves: bool = True) -> dict[str, Any]:
    """The initial rows of a run page. Pages whose charts load their own windows omit ``curves``."""
    replicas = replica_rows(run)
    return {
        "run": run_header(run),
        "pools": pool_rows(run),
        "replicas": replicas,
        "rounds": round_summaries.summaries(run, replicas=len(replicas)),
        "events": event_rows(run),
        "points": all_points(run) if curves else [],
    }
