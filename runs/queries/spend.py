"""Spending of all runs, by day, backend, owner, run and tag.

The cost of an attempt is spread over days (:mod:`runs.queries.attempt_costs`; that of most attempts
at once, :mod:`runs.queries.even_costs`), which are summed up to rows
(:mod:`runs.queries.spend_rows`).

Jobs without a known price are counted beside the sums, never as 0. The estimate for the traffic and
the requests of a run (:func:`runs.reconcile.billing.traffic_usd`) is spread evenly over the run, as
if it were a separate backend. The spending of deleted runs is stored by day, and spending belongs
to the tags of its time (:mod:`runs.queries.spend_history`). The number of queries depends only on
the number of jobs, by one for 10,000 runs.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any, TypeVar

import numpy as np
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import Q, QuerySet

from executors.registry import BACKENDS
from runs.json_values import finite, texts
from runs.models import EvaluationAttempt, ReplicaAttempt, ReplicaPool, RetainedSpend, Run
from runs.permissions import can_view
from runs.queries import even_costs, live_jobs
from runs.queries.attempt_costs import (
    BACKEND_OF_EVALUATION,
    COLUMNS,
    DAY,
    EVALUATION_COLUMNS,
    Attempt,
    Period,
    by_day,
    midnight,
    stretches,
)
from runs.queries.even_costs import EvenCosts, Parts, tallies
from runs.queries.live_jobs import JobFilter
from runs.queries.spend_history import SpendHistory, Stretch, distinct, history
from runs.queries.spend_rows import Groups, Tally, day_row, forecast, group_row, group_rows, total

MOST_ATTEMPTS = 50_000
"""Attempts that are read, the newest first; :attr:`archipelago.fleet_rows.Spend.complete` reports
that there were more."""
RUNS_AT_ONCE = 10_000
"""Parameters of one query, fewer than any database allows."""
GROUPS = 20
"""Rows of a table before the rest is summed up in one row."""
Key = TypeVar("Key")
TRAFFIC, TRAFFIC_LABEL = "traffic", "Traffic and requests (estimate)"
"""Key and label of the estimate for traffic among the backends."""


@dataclass(frozen=True, kw_only=True)
class _Scope:
    """What is summed up: the days of ``period``, and beside them those of ``month``, the present
    calendar month."""

    period: Period
    month: Period
    history: SpendHistory
    now: datetime

    @property
    def spans(self) -> list[Period]:
        """One span over both, or both if there is time between them."""
        if self.period.last < self.month.first:
            return [self.period, self.month]
        first = min(self.period.first, self.month.first)
        return [Period(first=first, last=max(self.period.last, self.month.last))]


@dataclass(frozen=True, kw_only=True)
class _Jobs:
    """The newest attempts, and whether they are all. ``others`` are those that are not even, of
    runs with a history, and of evaluations. ``pools`` has run and backend of the pools of the
    even ones."""

    even: EvenCosts
    pools: dict[int, tuple[uuid.UUID, str]]
    others: list[Attempt]
    complete: bool


@dataclass
class _Sums:
    """Sums over the attempts of a period."""

    by_run: dict[tuple[uuid.UUID, str], Tally] = field(default_factory=dict)
    """By run and backend."""
    by_day: dict[date, dict[str, Tally]] = field(default_factory=dict)
    month: Tally = field(default_factory=Tally)
    groups: Groups = field(default_factory=Groups)
    """Groups that the present rows of runs do not determine: deleted runs, and changed tags."""
    deleted: dict[uuid.UUID, str] = field(default_factory=dict)
    """Names of the deleted runs."""


def spend(
    user: AbstractBaseUser | AnonymousUser,
    period: Period,
    chosen: JobFilter,
    *,
    now: datetime,
    limit: int = GROUPS,
) -> dict[str, Any]:
    """The row of :class:`archipelago.fleet_rows.Spend`."""
    month = Period(first=now.date().replace(day=1), last=now.date())
    began = midnight(min(period.first, month.first))
    scope = _Scope(period=period, month=month, history=history(began), now=now)
    sums = _Sums()
    jobs = _jobs(user, chosen, scope)
    _add_even(sums, jobs, scope)
    for attempt in jobs.others:
        _add(sums, attempt, scope)
    for run, stretch in _traffic(user, chosen, scope.spans, now):
        _add_traffic(sums, run, stretch, scope)
    _add_retained(sums, user, chosen, scope)
    runs = _runs(list(dict.fromkeys(run for run, _ in sums.by_run)))
    _group_runs(sums, runs, scope.history)
    counted = live_jobs.counts(live_jobs.live_jobs(user))
    rate = live_jobs.matching_total(counted, chosen)
    return {
        "first": period.first.isoformat(),
        "last": period.last.isoformat(),
        "total": group_row("", "", total(sums.groups.backends.values())),
        "days": [day_row(day, sums.by_day.get(day, {})) for day in period.days],
        **_tables(sums, runs, limit),
        "complete": jobs.complete,
        "now": rate,
        "month_usd": sums.month.known_usd,
        "forecast_usd": forecast(sums.month, rate, now),
        "month_unpriced": sums.month.unpriced_jobs,
    }


def _jobs(user: AbstractBaseUser | AnonymousUser, chosen: JobFilter, scope: _Scope) -> _Jobs:
    """The attempts that ran in one of the spans."""
    if not can_view(user):
        return _Jobs(even=EvenCosts.of([], scope.now), pools={}, others=[], complete=True)
    ran = Q()
    for span in scope.spans:
        begin = Q(ended_at__isnull=True) | Q(ended_at__gte=midnight(span.first))
        ran |= Q(created_at__lt=midnight(span.last + DAY)) & begin
    billed = Q(launched_at__isnull=False) | Q(started_at__isnull=False)
    attempts = ReplicaAttempt.objects.filter(ran, billed, chosen.but(state="").condition())
    columns = _newest(attempts.filter(even_costs.COSTLY), *even_costs.COLUMNS)
    costs, number = EvenCosts.of(columns[:MOST_ATTEMPTS], scope.now), len(columns)
    pools = _pools(np.unique(costs.pool).tolist())
    with_history = {*scope.history.runs}
    has_history = [pk for pk, (run, _) in pools.items() if run in with_history]
    is_even = costs.is_even & ~np.isin(costs.pool, has_history)
    of_evaluations = EvaluationAttempt.objects.filter(ran, billed)
    if chosen.backend:
        of_evaluations = of_evaluations.annotate(backend=BACKEND_OF_EVALUATION)
        of_evaluations = of_evaluations.filter(backend=chosen.backend)
    if chosen.owner:
        of_evaluations = of_evaluations.filter(evaluation__run__owner__username=chosen.owner)
    evaluations = _newest(of_evaluations, *EVALUATION_COLUMNS)
    others = _by_id(costs.attempt[~is_even].tolist())
    others += evaluations[: max(MOST_ATTEMPTS - number, 0)]
    return _Jobs(
        even=costs.only(is_even & np.isin(costs.pool, list(pools))),
        pools=pools,
        others=[Attempt(*row) for row in others],
        complete=number + len(evaluations) <= MOST_ATTEMPTS,
    )


def _by_id(ids: Sequence[int]) -> list[Any]:
    """:data:`COLUMNS` of attempts."""
    rows: list[Any] = []
    for first in range(0, len(ids), RUNS_AT_ONCE):
        found = ReplicaAttempt.objects.filter(pk__in=ids[first : first + RUNS_AT_ONCE])
        rows += found.values_list(*COLUMNS)
    return rows


def _newest(attempts: QuerySet[Any], *columns: Any) -> list[Any]:
    """The newest attempts, one more than :data:`MOST_ATTEMPTS`."""
    return list(attempts.order_by("-id").values_list(*columns)[: MOST_ATTEMPTS + 1])


def _traffic(
    user: AbstractBaseUser | AnonymousUser,
    chosen: JobFilter,
    spans: Sequence[Period],
    now: datetime,
) -> Iterator[tuple[uuid.UUID, Stretch]]:
    """The estimates for traffic of the runs that ran in one of the spans, the newest first."""
    if not can_view(user) or chosen.backend not in ("", TRAFFIC):
        return
    ran = Q()
    for span in spans:
        begin = Q(ended_at__isnull=True) | Q(ended_at__gte=midnight(span.first))
        ran |= Q(started_at__lt=midnight(span.last + DAY)) & begin
    runs = Run.objects.filter(ran, traffic_usd__gt=0)
    if chosen.owner:
        runs = runs.filter(owner__username=chosen.owner)
    rows = runs.order_by("-created_at").values_list("pk", "traffic_usd", "started_at", "ended_at")
    for pk, usd, start, end in rows[:MOST_ATTEMPTS]:
        assert start is not None  # the condition excludes null
        yield pk, Stretch(start=start, end=max(start, end or now), usd=finite(usd) or 0.0)


def _add(sums: _Sums, attempt: Attempt, scope: _Scope) -> None:
    """Add one attempt to the sums of the days on which it ran."""
    whole, this_month = Tally(), Tally()
    of_tags: dict[str, Tally] = {}
    for stretch in stretches(attempt, scope.now):
        for tags, part in scope.history.parts(attempt.run, stretch):
            counted = Tally()
            for day, usd, s in _days(part, scope):
                if day in scope.period:
                    counted.count(usd, s)
                    of_day = sums.by_day.setdefault(day, {})
                    of_day.setdefault(attempt.backend, Tally()).count(usd, s)
                if day >= scope.month.first:
                    this_month.count(usd, s)
            whole.add(counted)
            for tag in distinct(tags) if tags is not None and counted.jobs else ():
                of_tags.setdefault(tag, Tally()).add(counted)
    if whole.jobs:
        key = attempt.run, attempt.backend
        sums.by_run.setdefault(key, Tally()).add(whole.of_one_job())
    for tag, tally in of_tags.items():
        sums.groups.tags.setdefault(tag, Tally()).add(tally.of_one_job())
    sums.month.add(this_month.of_one_job())


def _add_even(sums: _Sums, jobs: _Jobs, scope: _Scope) -> None:
    """The same for many attempts, of runs without a history."""
    costs, pools = jobs.even, jobs.pools
    ids, pool_of = np.unique(costs.pool, return_inverse=True)
    of_pools = [pools[pk] for pk in ids.tolist()]
    backends = sorted({backend for _, backend in of_pools})
    backend_of = np.array([backends.index(backend) for _, backend in of_pools], dtype=int)[pool_of]
    period, month = Parts(len(costs)), Parts(len(costs))
    for day in (day for span in scope.spans for day in span.days):
        places, usd, s = costs.on(day)
        if day in scope.period:
            period.add(places, usd, s)
            of_day = tallies(backend_of[places], len(backends), usd, s)
            _add_tallies(sums.by_day.setdefault(day, {}), backends, of_day)
        if day >= scope.month.first:
            month.add(places, usd, s)
    _add_tallies(sums.by_run, of_pools, period.tallies(pool_of, len(of_pools)))
    for tally in month.tallies(backend_of, len(backends)):
        sums.month.add(tally)


def _add_tallies(sums: dict[Key, Tally], keys: Sequence[Key], tallies: Sequence[Tally]) -> None:
    for key, tally in zip(keys, tallies, strict=True):
        if tally.jobs:
            sums.setdefault(key, Tally()).add(tally)


def _pools(ids: Sequence[int]) -> dict[int, tuple[uuid.UUID, str]]:
    """Run and backend of pools."""
    result = {}
    for first in range(0, len(ids), RUNS_AT_ONCE):
        rows = ReplicaPool.objects.filter(pk__in=ids[first : first + RUNS_AT_ONCE]).order_by()
        for pk, run, backend in rows.values_list("pk", "run_id", "backend"):
            result[pk] = run, backend
    return result


def _days(stretch: Stretch, scope: _Scope) -> Iterator[tuple[date, float | None, float]]:
    """Day, cost and seconds of a stretch in the period and in the month."""
    for span in scope.spans:
        for day, share, s in by_day(stretch, span):
            yield day, None if stretch.usd is None else stretch.usd * share, s


def _add_traffic(sums: _Sums, run: uuid.UUID, stretch: Stretch, scope: _Scope) -> None:
    """Add a run's estimate for traffic. It is no job, so only amounts are added."""
    for tags, part in scope.history.parts(run, stretch):
        for day, usd, _ in _days(part, scope):
            amount = Tally(usd=usd or 0.0)
            if day in scope.period:
                sums.by_run.setdefault((run, TRAFFIC), Tally()).add(amount)
                sums.by_day.setdefault(day, {}).setdefault(TRAFFIC, Tally()).add(amount)
                if tags is not None:
                    sums.groups.add_tags(amount, tags)
            if day >= scope.month.first:
                sums.month.add(amount)


def _add_retained(
    sums: _Sums, user: AbstractBaseUser | AnonymousUser, chosen: JobFilter, scope: _Scope
) -> None:
    """Add the stored spending of deleted runs."""
    if not can_view(user):
        return
    days = Q()
    for span in scope.spans:
        days |= Q(day__gte=span.first, day__lte=span.last)
    names = {"backend": chosen.backend, "owner": chosen.owner}
    chosen_by = {name: value for name, value in names.items() if value}
    rows = RetainedSpend.objects.filter(days, **chosen_by).order_by("-day", "-id")
    for row in rows[:MOST_ATTEMPTS].iterator(chunk_size=2000):
        tally = Tally(
            usd=finite(row.usd) or 0.0,
            unpriced_s=row.unpriced_s,
            jobs=row.jobs,
            unpriced_jobs=row.unpriced_jobs,
        )
        if row.day in scope.period:
            sums.deleted[row.run] = row.run_name
            sums.by_day.setdefault(row.day, {}).setdefault(row.backend, Tally()).add(tally)
            sums.groups.add(tally, backend=row.backend, owner=row.owner, run=row.run)
            sums.groups.add_tags(tally, texts(row.tags))
        if row.day >= scope.month.first:
            sums.month.add(tally)


@dataclass(frozen=True, kw_only=True)
class _Run:
    name: str
    owner: str
    tags: list[str]


def _runs(ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, _Run]:
    result = {}
    for first in range(0, len(ids), RUNS_AT_ONCE):
        rows = Run.objects.filter(pk__in=ids[first : first + RUNS_AT_ONCE]).order_by()
        for pk, name, owner, tags in rows.values_list("pk", "name", "owner__username", "tags"):
            result[pk] = _Run(name=name, owner=owner, tags=texts(tags))
    return result


def _group_runs(sums: _Sums, runs: dict[uuid.UUID, _Run], history: SpendHistory) -> None:
    """Add the sums of runs to those of the groups."""
    for (pk, backend), tally in sums.by_run.items():
        run = runs.get(pk)
        if run is None:
            continue  # deleted since
        sums.groups.add(tally, backend=backend, owner=run.owner, run=pk)
        if pk not in history.tags:
            sums.groups.add_tags(tally, run.tags)


def _tables(sums: _Sums, runs: dict[uuid.UUID, _Run], limit: int) -> dict[str, Any]:
    groups = sums.groups
    names = {str(pk): name for pk, name in sums.deleted.items()}
    names |= {str(pk): run.name for pk, run in runs.items()}
    deleted = {str(pk) for pk in sums.deleted if pk not in runs}
    by_run = group_rows(groups.runs, names, limit)
    return {
        "backends": group_rows(groups.backends, {**BACKENDS, TRAFFIC: TRAFFIC_LABEL}, limit),
        "owners": group_rows(groups.owners, {}, limit),
        "runs": [{**row, "deleted": row["key"] in deleted} for row in by_run],
        "tags": group_rows(groups.tags, {}, limit),
    }
