"""Spending of the runs of budgets, and rows of budgets.

Sums are computed by the database, except for the jobs that ran when the period began and those of
runs whose tags changed in it: their cost is spread over the time in which it arose, as on
:mod:`runs.queries.spend`. Spending stays with the owner and the tags that it was spent under, also
after the run is deleted (:mod:`runs.queries.spend_history`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from itertools import chain
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.db.models import Count, Q, Sum

from archipelago import frame_rows
from runs.backends.budgets import budgets_of, first_day, is_exceeded, next_day, spent_now
from runs.json_values import finite, row_of, texts
from runs.models import Budget, EvaluationAttempt, ReplicaAttempt, RetainedSpend, Run
from runs.permissions import can_view
from runs.queries import spend_history
from runs.queries.attempt_costs import COLUMNS, EVALUATION_COLUMNS, Attempt, midnight, stretches
from runs.queries.spend import RUNS_AT_ONCE
from runs.queries.spend_history import SpendHistory, Stretch

STRADDLING = 20_000
"""Jobs that are read at once. Of those that ran when a period began the newest count."""


@dataclass
class Spent:
    usd: float = 0.0
    unpriced_jobs: int = 0

    def add(self, usd: float, unpriced_jobs: int = 0) -> None:
        self.usd += usd
        self.unpriced_jobs += unpriced_jobs


@dataclass(frozen=True)
class Spending:
    """Spending of a period by owner and by tag."""

    owners: dict[str, Spent] = field(default_factory=dict)
    tags: dict[str, Spent] = field(default_factory=dict)

    def of(self, budget: Budget) -> Spent:
        names = self.owners if budget.scope == Budget.Scope.OWNER else self.tags
        return names.get(budget.name, Spent())


def spending_since(first: date, now: datetime) -> Spending:
    """Spending since the beginning of a day in UTC."""
    start = midnight(first)
    history, result = spend_history.history(start), Spending()
    by_run: dict[uuid.UUID, Spent] = {}
    for run, usd, unpriced in _within(start, history):
        by_run.setdefault(run, Spent()).add(finite(usd) or 0.0, unpriced)
    for part in chain(_by_time(start, now, history), _traffic(start, now, history)):
        by_run.setdefault(part.run, Spent()).add(part.usd, part.unpriced_jobs)
        for tag in part.tags:
            result.tags.setdefault(tag, Spent()).add(part.usd, part.unpriced_jobs)
    _group(by_run, history, result)
    _add_retained(first, result)
    return result


def spent_by_run(first: date, now: datetime) -> tuple[dict[uuid.UUID, Spent], bool]:
    """Spending of each run that exists since the beginning of a day in UTC, and whether all jobs
    are included. Six queries, whose cost depends on the jobs that run or ended since then."""
    start, by_run, complete = midnight(first), dict[uuid.UUID, Spent](), True
    history = SpendHistory(retained_until=spend_history.deleted_and_back())
    parts = [_traffic(start, now, history)]
    for attempts, columns in _JOBS:
        # A query for each, because an index serves each alone. A job that ends between the two is
        # in both.
        rows: dict[int, Sequence[Any]] = {}
        for ran in (Q(ended_at__isnull=True), Q(ended_at__gte=start)):
            jobs = attempts.filter(_BILLED, ran).order_by()
            found = list(jobs.values_list("pk", *columns)[: STRADDLING + 1])
            complete &= len(found) <= STRADDLING
            rows |= {pk: values for pk, *values in found[:STRADDLING]}
        parts.append(_parts(rows.values(), start, now, history))
    for part in chain.from_iterable(parts):
        by_run.setdefault(part.run, Spent()).add(part.usd, part.unpriced_jobs)
    return by_run, complete


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part of a job's cost. ``tags`` are those of its time, if the tags of the run changed."""

    run: uuid.UUID
    tags: Sequence[str]
    usd: float
    unpriced_jobs: int = 0


_JOBS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (ReplicaAttempt.objects, COLUMNS),
    (EvaluationAttempt.objects, EVALUATION_COLUMNS),
)
"""Attempts of replicas and of evaluations, with the columns of their costs; the first column is the
run."""
_BILLED = Q(launched_at__isnull=False) | Q(started_at__isnull=False)


def _within(
    start: datetime, history: SpendHistory
) -> Iterator[tuple[uuid.UUID, float | None, int]]:
    """Run, cost and unpriced jobs of the attempts that were created in the period, without those
    of :attr:`SpendHistory.runs`."""
    unpriced = Count("pk", filter=Q(price_usd_h=None, started_at__isnull=False))
    for attempts, columns in _JOBS:
        created = attempts.filter(_BILLED, created_at__gte=start).order_by()
        if history.runs:
            created = created.exclude(**{f"{columns[0]}__in": history.runs})
        yield from created.values_list(columns[0]).annotate(usd=Sum("cost_usd"), unpriced=unpriced)


def _by_time(start: datetime, now: datetime, history: SpendHistory) -> Iterator[_Part]:
    """The share of the period in the attempts that were created before it and ran in it, and in
    those of :attr:`SpendHistory.runs`."""
    ran = Q(ended_at__isnull=True) | Q(ended_at__gt=start)
    rows = chain.from_iterable(
        attempts.filter(_BILLED, ran)
        .filter(Q(created_at__lt=start) | Q(**{f"{columns[0]}__in": history.runs}))
        .order_by("-id")
        .values_list(*columns)[:STRADDLING]
        .iterator()
        for attempts, columns in _JOBS
    )
    return _parts(rows, start, now, history)


def _parts(
    rows: Iterable[Any], start: datetime, now: datetime, history: SpendHistory
) -> Iterator[_Part]:
    """The shares of the period in the costs of attempts, with the columns of :data:`_JOBS`."""
    for values in rows:
        attempt = Attempt(*values)
        for stretch in stretches(attempt, now):
            for tags, part in history.parts(attempt.run, stretch):
                share = _share(part.start, part.end, start, now)
                yield _Part(
                    run=attempt.run,
                    tags=tuple(dict.fromkeys(tags or ())),
                    usd=(part.usd or 0.0) * share,
                    unpriced_jobs=int(part.usd is None and share > 0),
                )


def _share(begin: datetime, end: datetime, start: datetime, now: datetime) -> float:
    """The part of a time that lies after ``start``."""
    whole = (end - begin).total_seconds()
    if whole <= 0:
        return float(begin >= start)
    return max((min(end, now) - max(begin, start)).total_seconds(), 0.0) / whole


def _traffic(start: datetime, now: datetime, history: SpendHistory) -> Iterator[_Part]:
    """The estimates of traffic, spread evenly over each run."""
    recent = Q(ended_at__isnull=True) | Q(ended_at__gt=start)
    runs = Run.objects.filter(recent, traffic_usd__gt=0, started_at__isnull=False).order_by()
    for pk, usd, began, ended in runs.values_list("pk", "traffic_usd", "started_at", "ended_at"):
        first, last = began or now, ended or now
        stretch = Stretch(start=first, end=max(first, last), usd=finite(usd) or 0.0)
        for tags, part in history.parts(pk, stretch):
            share = _share(part.start, part.end, start, now)
            yield _Part(
                run=pk, tags=tuple(dict.fromkeys(tags or ())), usd=(part.usd or 0.0) * share
            )


def _group(by_run: dict[uuid.UUID, Spent], history: SpendHistory, result: Spending) -> None:
    """Add the sums of runs to their owners, and to their tags if these never changed."""
    ids = list(by_run)
    for at in range(0, len(ids), RUNS_AT_ONCE):
        runs = Run.objects.filter(pk__in=ids[at : at + RUNS_AT_ONCE]).order_by()
        for pk, owner, tags in runs.values_list("pk", "owner__username", "tags"):
            spent = by_run[pk]
            result.owners.setdefault(owner, Spent()).add(spent.usd, spent.unpriced_jobs)
            for tag in () if pk in history.tags else dict.fromkeys(texts(tags)):
                result.tags.setdefault(tag, Spent()).add(spent.usd, spent.unpriced_jobs)


def _add_retained(first: date, result: Spending) -> None:
    """Add the stored spending of deleted runs."""
    rows = RetainedSpend.objects.filter(day__gte=first).order_by().values_list("owner", "tags")
    for owner, tags, usd, unpriced in rows.annotate(Sum("usd"), Sum("unpriced_jobs")):
        result.owners.setdefault(owner, Spent()).add(finite(usd) or 0.0, unpriced)
        for tag in dict.fromkeys(texts(tags)):
            result.tags.setdefault(tag, Spent()).add(finite(usd) or 0.0, unpriced)


def budget_rows(
    user: AbstractBaseUser | AnonymousUser, *, now: datetime, budgets: Iterable[Budget] = ()
) -> list[dict[str, Any]]:
    """Rows of all budgets, or of some, the nearest to its amount first."""
    if not can_view(user):
        return []
    return _rows(budgets or Budget.objects.all(), now)


def rows_of_owner(user: User, *, now: datetime, tags: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows of the budgets that a new run of a user with these tags counts towards. One query."""
    return _rows(budgets_of(user.pk, tags), now)


def rows_of_run(run_id: uuid.UUID, *, now: datetime) -> list[dict[str, Any]]:
    """Rows of the budgets that a run counts towards. Two queries."""
    found = Run.objects.filter(pk=run_id).values_list("owner_id", "tags").first()
    return _rows(budgets_of(found[0], texts(found[1])), now) if found else []


def _rows(budgets: Iterable[Budget], now: datetime) -> list[dict[str, Any]]:
    today = now.astimezone(UTC).date()
    rows = [_row(budget, today) for budget in budgets]
    return sorted(rows, key=lambda row: (-row["share"], row["scope"], row["name"]))


def _row(budget: Budget, today: date) -> dict[str, Any]:
    spent = spent_now(budget, today)
    share = spent / budget.amount_usd if budget.amount_usd else 1.0
    exceeded = is_exceeded(budget, today)
    last = next_day(budget.period, today) - timedelta(days=1)
    return row_of(
        frame_rows.Budget,
        budget,
        id=budget.pk,
        spent_usd=spent,
        share=share,
        state="exceeded" if exceeded else "warning" if share >= budget.warn_at else "ok",
        first=first_day(budget.period, today).isoformat(),
        last=last.isoformat(),
    )


def find(budget_id: int) -> Budget | None:
    return Budget.objects.filter(pk=budget_id).first()
