"""Spending of all runs, by day, backend, owner, run and tag.

The database stores one cost per attempt (:mod:`runs.reconcile.billing`). It is spread evenly over
the time in which it arose: from the start of the job to its end, or as far as it was billed. The
cost before a queue suspended a job is spread over the time before its last start. Days are in UTC.

Jobs without a known price are counted beside the sums, never as 0. The estimate for the traffic and
the requests of a run (:func:`runs.reconcile.billing.traffic_usd`) is spread evenly over the run, as
if it were a separate backend. The spending of deleted runs is stored by day, and spending belongs
to the tags of its time (:mod:`runs.queries.spend_history`). The number of queries depends only on
the number of jobs, by one for 10,000 runs.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from itertools import chain
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import CharField, F, Q, Value
from django.db.models.fields.json import KT
from django.db.models.functions import Coalesce

from executors.registry import BACKENDS
from runs.json_values import finite, texts
from runs.models import EvaluationAttempt, ReplicaAttempt, RetainedSpend, Run
from runs.permissions import can_view
from runs.queries import live_jobs
from runs.queries.live_jobs import JobFilter
from runs.queries.spend_history import SpendHistory, Stretch, distinct, history

LONGEST_DAYS = 366
EARLIEST = date(2000, 1, 1)
MOST_ATTEMPTS = 50_000
"""Attempts that are read, the newest first; :attr:`archipelago.fleet_rows.Spend.complete` reports
that there were more."""
RUNS_AT_ONCE = 10_000
"""Parameters of one query, fewer than any database allows."""
GROUPS = 20
"""Rows of a table before the rest is summed up in one row."""
TRAFFIC, TRAFFIC_LABEL = "traffic", "Traffic and requests (estimate)"
"""Key and label of the estimate for traffic among the backends."""
_DAY = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Period:
    """The days from ``first`` to ``last``, both included."""

    first: date
    last: date

    @classmethod
    def until(cls, last: date, *, first: date | None = None, days: int = 7) -> Period:
        """From ``first``, otherwise ``days`` days. Raises ``OverflowError`` for the year 1."""
        return cls(first=first or last - (days - 1) * _DAY, last=last)

    def problem(self, *, today: date) -> str:
        """Why the period cannot be shown; '' if it can."""
        if self.last < self.first:
            return f"expected a first day up to {self.last}, found {self.first}"
        if self.first < EARLIEST or self.last > today:
            return f"expected days from {EARLIEST} to {today}, found {self.first} to {self.last}"
        if (self.last - self.first).days >= LONGEST_DAYS:
            return (
                f"expected at most {LONGEST_DAYS} days, found {(self.last - self.first).days + 1}"
            )
        return ""

    @property
    def days(self) -> list[date]:
        return [self.first + n * _DAY for n in range((self.last - self.first).days + 1)]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The columns that a cost depends on."""

    run: uuid.UUID
    backend: str
    price: float | None
    cost: float | None
    earlier: float
    created_at: datetime
    launched_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None


COLUMNS: tuple[str, ...] = (
    "replica__run_id",
    "replica__pool__backend",
    "price_usd_h",
    "cost_usd",
    "earlier_cost_usd",
    "created_at",
    "launched_at",
    "started_at",
    "ended_at",
)


BACKEND_OF_EVALUATION = Coalesce(
    KT("handle__backend"), F("evaluation__plan__backend"), output_field=CharField()
)
"""The backend of an attempt's job. That of its plan can have changed since."""
EVALUATION_COLUMNS: tuple[Any, ...] = (
    "evaluation__run_id",
    BACKEND_OF_EVALUATION,
    *COLUMNS[2:4],
    Value(0.0),
    *COLUMNS[5:],
)
"""The same of an attempt of an evaluation."""


def stretches(attempt: Attempt, now: datetime) -> list[Stretch]:
    """The times in which an attempt ran, with their costs; empty if it cost nothing so far."""
    begun = attempt.started_at or attempt.launched_at or attempt.created_at
    end = attempt.ended_at or now
    if attempt.price is None or not math.isfinite(attempt.price):
        if attempt.started_at is None:
            return []
        return [Stretch(start=begun, end=max(begun, end), usd=None)]
    cost = finite(attempt.cost) or 0.0
    earlier = min(max(finite(attempt.earlier) or 0.0, 0.0), cost)
    result = []
    if earlier > 0:
        first = min(attempt.launched_at or attempt.created_at, begun)
        until = begun if attempt.started_at else end
        result.append(Stretch(start=first, end=max(first, until), usd=earlier))
    if cost > earlier or attempt.started_at:
        if attempt.ended_at is None and attempt.price > 0:
            # As far as its cost is stored, which is a little behind.
            hours = min((cost - earlier) / attempt.price, 1e6)
            end = min(end, begun + timedelta(hours=hours))
        result.append(Stretch(start=begun, end=max(begun, end), usd=cost - earlier))
    return result


def by_day(stretch: Stretch, period: Period) -> Iterator[tuple[date, float, float]]:
    """The days of the period with the share and the seconds of a stretch on each."""
    start, end = stretch.start, stretch.end
    length_s = (end - start).total_seconds()
    day = max(start.date(), period.first)
    last = min(end.date(), period.last)
    while day <= last:
        midnight = _midnight(day)
        s = (min(end, midnight + _DAY) - max(start, midnight)).total_seconds()
        if length_s <= 0:
            yield day, 1.0, 0.0
        elif s > 0:
            yield day, s / length_s, s
        day += _DAY


@dataclass
class Tally:
    """A sum of known costs, and what is unknown beside it."""

    usd: float = 0.0
    unpriced_s: float = 0.0
    jobs: int = 0
    unpriced_jobs: int = 0

    def count(self, usd: float | None, s: float) -> None:
        """Add a part of a job."""
        self.jobs += 1
        if usd is None:
            self.unpriced_jobs += 1
            self.unpriced_s += s
        else:
            self.usd += usd

    def of_one_job(self) -> Tally:
        """The same, if all parts are of one job."""
        self.jobs, self.unpriced_jobs = min(self.jobs, 1), min(self.unpriced_jobs, 1)
        return self

    def add(self, other: Tally) -> None:
        self.usd += other.usd
        self.unpriced_s += other.unpriced_s
        self.jobs += other.jobs
        self.unpriced_jobs += other.unpriced_jobs

    @property
    def known_usd(self) -> float | None:
        """None if no price is known."""
        return None if self.jobs and self.unpriced_jobs == self.jobs else self.usd


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


@dataclass
class _Groups:
    """The rows of the tables."""

    backends: dict[str, Tally] = field(default_factory=dict)
    owners: dict[str, Tally] = field(default_factory=dict)
    runs: dict[str, Tally] = field(default_factory=dict)
    tags: dict[str, Tally] = field(default_factory=dict)

    def add(self, tally: Tally, *, backend: str, owner: str, run: uuid.UUID) -> None:
        for group, key in ((self.backends, backend), (self.owners, owner), (self.runs, str(run))):
            group.setdefault(key, Tally()).add(tally)

    def add_tags(self, tally: Tally, tags: Sequence[str]) -> None:
        for tag in distinct(tags):
            self.tags.setdefault(tag, Tally()).add(tally)


@dataclass
class _Sums:
    """Sums over the attempts of a period."""

    by_run: dict[tuple[uuid.UUID, str], Tally] = field(default_factory=dict)
    """By run and backend."""
    by_day: dict[date, dict[str, Tally]] = field(default_factory=dict)
    month: Tally = field(default_factory=Tally)
    groups: _Groups = field(default_factory=_Groups)
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
    began = _midnight(min(period.first, month.first))
    scope = _Scope(period=period, month=month, history=history(began), now=now)
    sums = _Sums()
    number = 0
    for number, values in enumerate(_attempts(user, chosen, scope.spans), start=1):
        if number > MOST_ATTEMPTS:
            break
        _add(sums, Attempt(*values), scope)
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
        "total": _group("", "", _sum(sums.groups.backends.values())),
        "days": [_day_row(day, sums.by_day.get(day, {})) for day in period.days],
        **_tables(sums, runs, limit),
        "complete": number <= MOST_ATTEMPTS,
        "now": rate,
        "month_usd": sums.month.known_usd,
        "forecast_usd": _forecast(sums.month, rate, now),
        "month_unpriced": sums.month.unpriced_jobs,
    }


def _attempts(
    user: AbstractBaseUser | AnonymousUser, chosen: JobFilter, spans: Sequence[Period]
) -> Iterator[Any]:
    """The attempts of replicas and then of evaluations that ran in one of the spans, the newest
    first."""
    if not can_view(user):
        return iter(())
    ran = Q()
    for span in spans:
        begin = Q(ended_at__isnull=True) | Q(ended_at__gte=_midnight(span.first))
        ran |= Q(created_at__lt=_midnight(span.last + _DAY)) & begin
    billed = Q(launched_at__isnull=False) | Q(started_at__isnull=False)
    attempts = ReplicaAttempt.objects.filter(ran, billed, chosen.but(state="").condition())
    newest = attempts.order_by("-id").values_list(*COLUMNS)[: MOST_ATTEMPTS + 1]
    of_evaluations = EvaluationAttempt.objects.filter(ran, billed)
    if chosen.backend:
        of_evaluations = of_evaluations.annotate(backend=BACKEND_OF_EVALUATION)
        of_evaluations = of_evaluations.filter(backend=chosen.backend)
    if chosen.owner:
        of_evaluations = of_evaluations.filter(evaluation__run__owner__username=chosen.owner)
    rows = of_evaluations.order_by("-id").values_list(*EVALUATION_COLUMNS)[: MOST_ATTEMPTS + 1]
    return chain(newest.iterator(chunk_size=2000), rows.iterator(chunk_size=2000))


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
        begin = Q(ended_at__isnull=True) | Q(ended_at__gte=_midnight(span.first))
        ran |= Q(started_at__lt=_midnight(span.last + _DAY)) & begin
    runs = Run.objects.filter(ran, traffic_usd__gt=0)
    if chosen.owner:
        runs = runs.filter(owner__username=chosen.owner)
    rows = runs.order_by("-created_at").values_list("pk", "traffic_usd", "started_at", "ended_at")
    for pk, usd, start, end in rows[:MOST_ATTEMPTS]:
        assert start is not None  # the condition excludes null
        yield pk, Stretch(start=start, end=max(start, end or now), usd=finite(usd) or 0.0)


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def _add(sums: _Sums, attempt: Attempt, scope: _Scope) -> None:
    """Add one attempt to the sums of the days on which it ran."""
    whole, this_month = Tally(), Tally()
    of_tags: dict[str, Tally] = {}
    for stretch in stretches(attempt, scope.now):
        for tags, part in scope.history.parts(attempt.run, stretch):
            counted = Tally()
            for day, usd, s in _days(part, scope):
                if _is_in(day, scope.period):
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


def _days(stretch: Stretch, scope: _Scope) -> Iterator[tuple[date, float | None, float]]:
    """Day, cost and seconds of a stretch in the period and in the month."""
    for span in scope.spans:
        for day, share, s in by_day(stretch, span):
            yield day, None if stretch.usd is None else stretch.usd * share, s


def _is_in(day: date, period: Period) -> bool:
    return period.first <= day <= period.last


def _add_traffic(sums: _Sums, run: uuid.UUID, stretch: Stretch, scope: _Scope) -> None:
    """Add a run's estimate for traffic. It is no job, so only amounts are added."""
    for tags, part in scope.history.parts(run, stretch):
        for day, usd, _ in _days(part, scope):
            amount = Tally(usd=usd or 0.0)
            if _is_in(day, scope.period):
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
        if _is_in(row.day, scope.period):
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
    by_run = _groups(groups.runs, names, limit)
    return {
        "backends": _groups(groups.backends, {**BACKENDS, TRAFFIC: TRAFFIC_LABEL}, limit),
        "owners": _groups(groups.owners, {}, limit),
        "runs": [{**row, "deleted": row["key"] in deleted} for row in by_run],
        "tags": _groups(groups.tags, {}, limit),
    }


def _groups(tallies: dict[str, Tally], labels: dict[str, str], limit: int) -> list[dict[str, Any]]:
    """Rows of a table, the most expensive first, and one that sums up the rest."""
    order = sorted(tallies.items(), key=lambda item: (-item[1].usd, -item[1].unpriced_s, item[0]))
    rows = [_group(key, labels.get(key, key), tally) for key, tally in order[:limit]]
    rest = order[limit:]
    if rest:
        rows.append(_group("", "", _sum(tally for _, tally in rest), others=len(rest)))
    return rows


def _group(key: str, label: str, tally: Tally, *, others: int = 0) -> dict[str, Any]:
    return {
        "key": key,
        "label": label,
        "jobs": tally.jobs,
        "usd": finite(tally.known_usd),
        "unpriced_jobs": tally.unpriced_jobs,
        "unpriced_s": tally.unpriced_s,
        "others": others,
        "deleted": False,
    }


def _sum(tallies: Any) -> Tally:
    result = Tally()
    for tally in tallies:
        result.add(tally)
    return result


def _day_row(day: date, backends: dict[str, Tally]) -> dict[str, Any]:
    whole = _sum(backends.values())
    return {
        "day": day.isoformat(),
        "usd": finite(whole.known_usd),
        "unpriced_s": whole.unpriced_s,
        "backends": {name: tally.usd for name, tally in sorted(backends.items()) if tally.usd > 0},
    }


def _forecast(month: Tally, rate: dict[str, Any], now: datetime) -> float | None:
    """Spending of the calendar month if the present jobs run until its end."""
    spent, usd_h = month.known_usd, rate["usd_h"]
    if spent is None or usd_h is None:
        return None
    following = (now.replace(day=1) + 32 * _DAY).replace(day=1)
    end = following.replace(hour=0, minute=0, second=0, microsecond=0)
    return finite(spent + usd_h * (end - now).total_seconds() / 3600)
