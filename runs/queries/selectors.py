"""Queries, and the JSON-able rows that page, polling and live stream share.

Every function costs a constant number of queries, whatever the number of replicas or rounds; a
test counts them. Times are ISO 8601 in UTC; what is not known is null, and so is a number that is
not finite (JSON has no NaN).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import Count, Exists, F, OuterRef, Prefetch, Q, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce
from django.utils import timezone

from runs import live_stream
from runs.json_values import finite, iso, mapping
from runs.metrics import charts, round_strips
from runs.metrics.blocks import Points
from runs.metrics.columns import columns
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
from runs.permissions import may_look
from runs.queries.fleet import pool_rows, replica_rows
from runs.states import REPLICA_ENDED, REPLICA_LIVE, RUN_ACTIVE, RUN_LIVE, RunState

MAX_POINTS = 2000
SNAPSHOT_POINTS = 500
"""Per series in a snapshot, fewer where there are many; more are asked for by window."""
ALL_POINTS = 100_000
"""Of all series together."""

ROUNDS_LIMIT = 2000
"""Rounds in one answer, the newest; older ones are asked for with ``since``."""
SNAPSHOT_CONTRIBUTIONS = 6000
"""In a snapshot: with many replicas it has fewer rounds."""

JOURNAL_RETRY_CAP = timedelta(minutes=5)
"""The longest wait between writes of a journal that fail (:mod:`runs.ingest.journal`)."""

DRAIN_FOR = timedelta(hours=1)
"""How long after a run's end, or after the last that came, more of its telemetry is waited for."""


# Who may do what.


def runs_for(user: AbstractBaseUser | AnonymousUser) -> QuerySet[Run]:
    """The runs a user may see, newest first, ready for :func:`run_header` without more queries."""
    if not may_look(user):
        return Run.objects.none()
    return with_header(Run.objects.all())


def with_header(runs: QuerySet[Run]) -> QuerySet[Run]:
    # A subquery, because an aggregate over a join would group by every column and, for that, drop
    # the model's ordering.
    live_stream = Replica.objects.filter(run=OuterRef("pk"), state__in=REPLICA_LIVE).order_by()
    count = Subquery(live_stream.values("run").annotate(count=Count("pk")).values("count"))
    alerts = Alert.objects.filter(run=OuterRef("pk"), closed_at=None, acknowledged_at=None)
    waiting = alerts.order_by().values("run").annotate(count=Count("pk")).values("count")
    pools = ReplicaPool.objects.filter(run=OuterRef("pk")).order_by()
    wanted = Subquery(pools.values("run").annotate(wanted=Sum("count")).values("wanted"))
    # Counted, not EXISTS: that PostgreSQL answers for all runs at once, by reading every pool.
    unpriced = pools.filter(price_usd_h=None).values("run").annotate(count=Count("pk"))
    return runs.select_related("owner").annotate(
        live_count=Coalesce(count, 0),
        alert_count=Coalesce(Subquery(waiting), 0),
        wanted=wanted,
        unpriced=Coalesce(Subquery(unpriced.values("count")), 0),
    )


def runs_to_look_after() -> QuerySet[Run]:
    """Active runs, and ended or paused ones with a job that may still run, a replica to be let go,
    telemetry still to read, a pass of ingest that an ended job waits for, news for the journal, or
    an end that was not announced."""
    jobs = ReplicaAttempt.objects.filter(replica__run=OuterRef("pk"), ended_at=None)
    unread = Cursor.objects.filter(replica__run=OuterRef("pk"), ended=False)
    unpassed = IngestState.objects.filter(run=OuterRef("pk"), complete_pass__lt=F("wanted_pass"))
    waiting = Replica.objects.filter(run=OuterRef("pk")).exclude(state__in=REPLICA_ENDED)
    paused = Q(state=RunState.PAUSED)
    now = timezone.now()
    # Put off after a failed write; not for longer than any retry, should the clock have jumped.
    put_off = Q(retry_at__gt=now, retry_at__lt=now + 2 * JOURNAL_RETRY_CAP)
    unsaid = Journal.objects.filter(run=OuterRef("pk"), due=True).exclude(put_off)
    then = now - DRAIN_FOR
    recent = Q(ended_at__gte=then) | Q(paused, state_since__gte=then) | Q(last_seen_at__gte=then)
    return Run.objects.filter(
        Q(state__in=RUN_ACTIVE)
        | Q(recent & (Exists(unread) | Exists(unpassed)))
        | Q(Exists(jobs))
        | Q(~paused & Exists(waiting))
        | Q(Exists(unsaid))
        | Q(end_due=True)
    ).order_by("created_at")


def runs_to_delete() -> QuerySet[Run]:
    """Runs whose deletion was asked for a while ago and has not come about."""
    a_while_ago = timezone.now() - timedelta(minutes=5)
    return Run.objects.filter(delete_requested_at__lt=a_while_ago)


# Rows.


def run_header(run: Run) -> dict[str, Any]:
    """The run in one line. Costs no query for a run from :func:`runs_for`."""
    if not hasattr(run, "live_count"):
        run = with_header(Run.objects.filter(pk=run.pk)).get()
    found: Any = run  # what with_header adds is not in the model
    active = run.state in RUN_LIVE
    return {
        "id": str(run.pk),
        "name": run.name,
        "state": str(run.state),
        "state_reason": run.state_reason,
        "state_since": iso(run.state_since),
        "owner": run.owner.get_username(),
        "committed_rounds": run.committed_rounds,
        "total_rounds": run.total_rounds,
        "tokens": run.tokens,
        "tokens_per_s": finite(run.tokens_per_s) if active else None,
        "train_loss": finite(run.train_loss),
        "eval_loss": finite(run.eval_loss),
        "live": found.live_count,
        "alerts": found.alert_count,
        "quorum": int(run.group_settings["min_quorum"]),
        "target": found.wanted or int(run.group_settings["num_replicas"]),
        "eta_s": eta_s(run) if active and run.state != RunState.STALLED else None,
        "created_at": iso(run.created_at),
        "started_at": iso(run.started_at),
        "ended_at": iso(run.ended_at),
        "last_seen_at": iso(run.last_seen_at),
        "goodput": goodput(run.phase_s),
        "bytes_up": run.bytes_up,
        "bytes_down": run.bytes_down,
        "cost_usd": run.cost_usd,
        "cost_known": not found.unpriced,
        "budget_usd": run.budget_usd,
    }


def eta_s(run: Run) -> float | None:
    """Seconds to the end at the pace of the last rounds: by rounds, or by tokens if sooner."""
    if run.round_s is None:
        return None
    rounds = max(run.total_rounds - run.committed_rounds, 0)
    limit = int(run.group_settings["max_tokens"])
    if limit and run.tokens and run.committed_rounds:
        per_round = run.tokens / run.committed_rounds
        rounds = min(rounds, math.ceil(max(limit - run.tokens, 0) / per_round))
    return round(rounds * run.round_s, 1)


def goodput(phase_s: Mapping[str, Any]) -> float | None:
    """Compute seconds over all seconds of all rounds' phases; null before the first round."""
    known = mapping(phase_s).items()
    seconds = {k: float(s) for k, s in known if isinstance(s, int | float) and finite(s)}
    total = sum(seconds.values())
    if not total > 0 or finite(total) is None:
        return None
    return round(seconds.get("compute", 0.0) / total, 4)


def round_rows(
    run: Run,
    since: int = 0,
    *,
    numbers: Iterable[int] | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Rounds after ``since``, oldest first, at most the newest ``limit`` (:data:`ROUNDS_LIMIT` at
    most); or just those of ``numbers``."""
    rounds = Round.objects.filter(run=run, number__gt=since)
    if numbers is not None:
        rounds = rounds.filter(number__in=list(numbers))
    rounds = rounds.prefetch_related(
        Prefetch(
            "contributions",
            queryset=Contribution.objects.select_related("replica").order_by("replica__number"),
        )
    )
    most = ROUNDS_LIMIT if limit is None else min(limit, ROUNDS_LIMIT)
    newest = list(rounds.order_by("-number")[:most])
    return [_round_row(r) for r in reversed(newest)]


def _round_row(r: Round) -> dict[str, Any]:
    return {
        "number": r.number,
        "fragment": r.fragment,
        "state": str(r.state),
        "reason": r.reason,
        "contributors": r.contributors,
        "mode": r.mode,
        "committed_at": iso(r.committed_at),
        "loss": finite(r.loss),
        "eval_loss": finite(r.eval_loss),
        "tokens_total": r.tokens_total,
        "weights_digest": r.weights_digest,
        "digest_mismatch": r.digest_mismatch,
        "healing": round_strips.healing(bytes(r.outcomes)),
        "contributions": [
            {
                "replica": c.replica.number,
                "state": str(c.state),
                "reason": c.reason,
                "late_s": round_strips.late_s(r, c),
                "base_round": c.base_round,
                "norm": finite(c.norm),
                "update_norm": finite(c.update_norm),
                "cosine": finite(c.cosine),
                "size_bytes": c.size_bytes,
                "bytes_up": c.bytes_up,
                "bytes_down": c.bytes_down,
                "requests": c.requests,
                "phases": c.phases,
                "started_at": iso(c.started_at),
                "committed_at": iso(c.committed_at),
            }
            for c in r.contributions.all()
        ],
    }


def event_rows(run: Run, after_id: int = 0, limit: int = 100) -> list[dict[str, Any]]:
    """The newest ``limit`` events after ``after_id``, newest first."""
    return [event_row(e) for e in events_of(run, after_id).order_by("-id")[:limit]]


def events_of(run: Run, after_id: int) -> QuerySet[Event]:
    """With what :func:`event_row` needs."""
    return Event.objects.filter(run=run, id__gt=after_id).select_related("replica", "actor")


def event_row(e: Event) -> dict[str, Any]:
    return {
        "id": e.pk,
        "at": iso(e.at),
        "level": str(e.level),
        "kind": e.kind,
        "replica": e.replica.number if e.replica else None,
        "actor": e.actor.get_username() if e.actor else None,
        "from_state": e.from_state,
        "to_state": e.to_state,
        "message": e.message,
    }


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
    """The newest ``limit`` log lines after ``after_id``, oldest first; or as many on both sides of
    the line ``around``. ``level`` is one of :data:`LOG_LEVELS`: that and worse."""
    lines = LogLine.objects.filter(replica__run=run, id__gt=after_id).select_related("replica")
    if replica is not None:
        lines = lines.filter(replica__number=replica)
    if search:
        lines = lines.filter(message__icontains=search)
    if level in LOG_LEVELS:
        names = LOG_LEVELS[level]
        lines = lines.filter(level__in=[*names, *(name.upper() for name in names)])
    if around is None:
        found = list(lines.order_by("-id")[:limit])[::-1]
    else:
        before = lines.filter(id__lte=around).order_by("-id")[: limit // 2]
        found = [*list(before)[::-1], *lines.filter(id__gt=around).order_by("id")[: limit // 2]]
    return [
        {
            "id": line.pk,
            "at": iso(line.at),
            "replica": line.replica.number,
            "level": line.level,
            "message": line.message,
        }
        for line in found
    ]


def points(
    run: Run,
    series: str,
    *,
    replica: int | None = None,
    after_step: int = -1,
    max_points: int = MAX_POINTS,
) -> dict[str, Any]:
    """Columns of one series past ``after_step``; ``total`` counts what was there to choose from."""
    low = after_step + 1 if after_step >= 0 else None
    window = charts.Window(low=low, max_points=max_points)
    total, found = 0, Points.empty()
    for curve in charts.read(run, [(series, replica)], window):
        total, found = curve.total, curve.points.take(curve.points.step > after_step)
    return columns(found, series=series, replica=replica, total=max(total, len(found)))


def series_of(run: Run) -> list[tuple[str, int | None]]:
    """(series, replica number or None) that have points."""
    return charts.names_of(run)


def all_points(run: Run, *, max_points: int = SNAPSHOT_POINTS) -> list[dict[str, Any]]:
    """Columns of every series of the run, in a constant number of queries."""
    names = series_of(run)
    each = max(min(max_points, ALL_POINTS // max(len(names), 1)), 8)
    curves = charts.read(run, names, charts.Window(max_points=each))
    return [columns(c.points, series=c.series, replica=c.owner, total=c.total) for c in curves]


def snapshot(run: Run, *, curves: bool = True) -> dict[str, Any]:
    """All a page shows at first. ``cursor`` is read before the rows, so a stream resumed there may
    repeat what is in them and never misses anything: points are told by their step, events by
    their id, rounds and replicas by their number. A page whose charts ask for their own windows
    does without ``curves``."""
    cursor = live_stream.latest_id()
    replicas = replica_rows(run)
    return {
        "run": run_header(run),
        "pools": pool_rows(run),
        "replicas": replicas,
        "rounds": round_rows(run, limit=SNAPSHOT_CONTRIBUTIONS // max(len(replicas), 1)),
        "events": event_rows(run),
        "points": all_points(run) if curves else [],
        "cursor": cursor,
    }
