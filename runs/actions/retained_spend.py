"""Keep what was spent when a run is deleted or its tags change, for budgets and spending.

Callers hold the row of the run locked.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime

from django.db.models import F

from runs.json_values import finite
from runs.models import EvaluationAttempt, ReplicaAttempt, RetainedSpend, Run, Sweep, TagPeriod
from runs.queries import attempt_costs
from runs.queries.attempt_costs import EARLIEST, Attempt, Period, by_day
from runs.queries.spend import TRAFFIC
from runs.queries.spend_history import Stretch, history_of
from runs.queries.spend_rows import Tally

MOST_TAG_PERIODS = 200
"""Of one run: each divides its costs."""


def end_tags(run: Run, *, now: datetime) -> None:
    """Keep the present tags of a run for what it has spent so far; the caller then changes them.

    Beyond ``MOST_TAG_PERIODS`` the shortest period is joined with the next one. Changing tags often
    thus moves less than that part of the run's time from one tag to another.
    """
    TagPeriod.objects.create(run=run, tags=run.tags, until=now)
    periods = list(TagPeriod.objects.filter(run=run).order_by("until", "id"))
    if len(periods) > MOST_TAG_PERIODS:
        starts = [run.created_at, *(period.until for period in periods)]
        shortest, _ = min(
            zip(periods, starts, strict=False), key=lambda pair: pair[0].until - pair[1]
        )
        shortest.delete()


def retain(run: Run, *, now: datetime) -> None:
    """Store what an ended run has spent, by day, backend and tags; the caller then deletes it."""
    history = history_of(run)
    period = Period(first=EARLIEST, last=now.astimezone(UTC).date())
    tallies: dict[tuple[date, str, tuple[str, ...]], Tally] = {}
    for backend, stretches in _spent(run, now):
        is_new = backend != TRAFFIC
        for stretch in stretches:
            for tags, part in history.parts(run.pk, stretch):
                for day, share, s in by_day(part, period):
                    tally = tallies.setdefault((day, backend, tags or ()), Tally())
                    tally.count(None if part.usd is None else part.usd * share, s)
                    if not is_new:  # a job is counted once
                        tally.jobs -= 1
                        tally.unpriced_jobs -= part.usd is None
                    is_new = False
    RetainedSpend.objects.bulk_create(
        RetainedSpend(
            run=run.pk,
            run_name=run.name,
            owner=run.owner.get_username(),
            tags=list(tags),
            backend=backend[:64],
            day=day,
            usd=finite(tally.usd) or 0.0,
            jobs=tally.jobs,
            unpriced_jobs=tally.unpriced_jobs,
            unpriced_s=tally.unpriced_s,
            deleted_at=now,
        )
        for (day, backend, tags), tally in tallies.items()
    )
    if run.sweep_id is not None:
        cost = finite(run.cost_usd) or 0.0
        Sweep.objects.filter(pk=run.sweep_id).update(deleted_usd=F("deleted_usd") + cost)


def _spent(run: Run, now: datetime) -> Iterator[tuple[str, list[Stretch]]]:
    """The backend of each job of a run with the times in which it cost something, and those of its
    traffic."""
    replicas = ReplicaAttempt.objects.filter(replica__run=run).values_list(*attempt_costs.COLUMNS)
    evaluations = EvaluationAttempt.objects.filter(evaluation__run=run)
    for jobs in (replicas, evaluations.values_list(*attempt_costs.EVALUATION_COLUMNS)):
        for values in jobs.iterator(chunk_size=2000):
            attempt = Attempt(*values)
            if attempt.launched_at or attempt.started_at:
                yield attempt.backend, attempt_costs.stretches(attempt, now)
    if run.started_at is not None and run.traffic_usd > 0:
        end = max(run.started_at, run.ended_at or now)
        usd = finite(run.traffic_usd) or 0.0
        yield TRAFFIC, [Stretch(start=run.started_at, end=end, usd=usd)]
