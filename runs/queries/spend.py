"""Spending of all runs, by day, backend, owner, run and tag.

The database stores one cost per attempt (:mod:`runs.reconcile.billing`). It is spread evenly over
the time in which it arose: from the start of the job to its end, or as far as it was billed. The
cost before a queue suspended a job is spread over the time before its last start. Days are in UTC.

Jobs without a known price are counted beside the sums, never as 0. The estimate for the traffic and
the requests of a run (:func:`runs.reconcile.billing.traffic_usd`) is spread evenly over the run, as
if it were a separate backend. Deleted runs are left out, because their attempts are deleted with
them. The number of queries depends only on the number of jobs, by one for 10,000 runs.
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
from runs.models import EvaluationAttempt, ReplicaAttempt, Run
from runs.permissions import can_view
from runs.queries import live_jobs
from runs.queries.live_jobs import JobFilter

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A time in which an attempt cost ``usd`` evenly; None: its price is unknown."""

    start: datetime
    end: datetime
    usd: float | None


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


@dataclass
class _Sums:
    """Sums over the attempts of a period."""

    by_run: dict[tuple[uuid.UUID, str], Tally] = field(default_factory=dict)
    """By run and backend."""
    by_day: dict[date, dict[str, Tally]] = field(default_factory=dict)
    month: Tally = field(default_factory=Tally)


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
    spans = _joined(period, month)
    sums = _Sums()
    number = 0
    for number, values in enumerate(_attempts(user, chosen, spans), start=1):
        if number > MOST_ATTEMPTS:
            break
        _add(sums, Attempt(*values), spans, period, month, now)
    for run, stretch in _traffic(user, chosen, spans, now):
        _add_traffic(sums, run, stretch, spans, period, month)
    runs = _runs(list(dict.fromkeys(run for run, _ in sums.by_run)))
    counted = live_jobs.counts(live_jobs.live_jobs(user))
    rate = live_jobs.matching_total(counted, chosen)
    return {
        "first": period.first.isoformat(),
        "last": period.last.isoformat(),
        "total": _group("", "", _sum(sums.by_run.values())),
        "days": [_day_row(day, sums.by_day.get(day, {})) for day in period.days],
        **_tables(sums, runs, limit),
        "complete": number <= MOST_ATTEMPTS,
        "now": rate,
        "month_usd": sums.month.known_usd,
        "forecast_usd": _forecast(sums.month, rate, now),
        "month_unpriced": sums.month.unpriced_jobs,
    }


def _joined(period: Period, month: Period) -> list[Period]:
    """One span over both periods, or both if there is time between them."""
    if period.last < month.first:
        return [period, month]
    return [Period(first=min(period.first, month.first), last=max(period.last, month.last))]


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


def _add(
    sums: _Sums,
    attempt: Attempt,
    spans: Sequence[Period],
    period: Period,
    month: Period,
    now: datetime,
) -> None:
    """Add one attempt to the sums of the days on which it ran."""
    whole, this_month = Tally(), Tally()
    for stretch in stretches(attempt, now):
        for span in spans:
            for day, share, s in by_day(stretch, span):
                usd = None if stretch.usd is None else stretch.usd * share
                if period.first <= day <= period.last:
                    whole.count(usd, s)
                    of_day = sums.by_day.setdefault(day, {})
                    of_day.setdefault(attempt.backend, Tally()).count(usd, s)
                if day >= month.first:
                    this_month.count(usd, s)
    if whole.jobs:
        key = attempt.run, attempt.backend
        sums.by_run.setdefault(key, Tally()).add(whole.of_one_job())
    sums.month.add(this_month.of_one_job())


def _add_traffic(
    sums: _Sums,
    run: uuid.UUID,
    stretch: Stretch,
    spans: Sequence[Period],
    period: Period,
    month: Period,
) -> None:
    """Add a run's estimate for traffic. It is no job, so only amounts are added."""
    for span in spans:
        for day, share, _ in by_day(stretch, span):
            usd = (stretch.usd or 0.0) * share
            if period.first <= day <= period.last:
                sums.by_run.setdefault((run, TRAFFIC), Tally()).usd += usd
                sums.by_day.setdefault(day, {}).setdefault(TRAFFIC, Tally()).usd += usd
            if day >= month.first:
                sums.month.usd += usd


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


def _tables(sums: _Sums, runs: dict[uuid.UUID, _Run], limit: int) -> dict[str, Any]:
    backends: dict[str, Tally] = {}
    owners: dict[str, Tally] = {}
    by_run: dict[str, Tally] = {}
    tags: dict[str, Tally] = {}
    for (pk, backend), tally in sums.by_run.items():
        run = runs.get(pk)
        if run is None:
            continue  # deleted since
        backends.setdefault(backend, Tally()).add(tally)
        owners.setdefault(run.owner, Tally()).add(tally)
        by_run.setdefault(str(pk), Tally()).add(tally)
        for tag in dict.fromkeys(run.tags) or ("",):
            tags.setdefault(tag, Tally()).add(tally)
    names = {str(pk): run.name for pk, run in runs.items()}
    return {
        "backends": _groups(backends, {**BACKENDS, TRAFFIC: TRAFFIC_LABEL}, limit),
        "owners": _groups(owners, {}, limit),
        "runs": _groups(by_run, names, limit),
        "tags": _groups(tags, {}, limit),
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
