"""Backend jobs of all runs that have not ended: pages, sums and filters.

Every function makes one query, whatever the number of jobs. Jobs are ordered by replica, those of
the newest run first, because an index of the open attempts has that order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import Count, Q, QuerySet, Sum

from executors.registry import BACKENDS
from runs.json_values import finite, iso
from runs.models import ReplicaAttempt
from runs.permissions import can_view
from runs.queries.replica_history import console_url

PAGE = 50
PLACE = r"^[0-9]{1,18}_[0-9]{1,18}$"
"""Position of a page: the ids of a replica and of its attempt."""

_COLUMNS = {
    "id": "id",
    "number": "attempt",
    "handle": "handle",
    "created_at": "created_at",
    "launched_at": "launched_at",
    "started_at": "started_at",
    "deadline_at": "deadline_at",
    "price_usd_h": "price_usd_h",
    "cost_usd": "cost_usd",
    "replica_id": "replica_id",
    "replica__number": "replica",
    "replica__state": "state",
    "replica__backend_state": "backend_state",
    "replica__pending_cause": "pending",
    "replica__pool_id": "pool",
    "replica__pool__backend": "backend",
    "replica__pool__hardware": "hardware",
    "replica__pool__region": "region",
    "replica__pool__spot": "spot",
    "replica__run_id": "run",
    "replica__run__name": "run_name",
    "replica__run__owner__username": "owner",
}
"""Column -> its name in a row."""


@dataclass(frozen=True, kw_only=True)
class JobFilter:
    """Filters of jobs; an empty one matches every job."""

    backend: str = ""
    owner: str = ""
    state: str = ""

    def condition(self) -> Q:
        names = {
            "replica__pool__backend": self.backend,
            "replica__run__owner__username": self.owner,
            "replica__state": self.state,
        }
        return Q(**{column: value for column, value in names.items() if value})

    def but(self, **changes: str) -> JobFilter:
        return replace(self, **changes)

    def matches(self, *, backend: str, owner: str, state: str) -> bool:
        return (
            self.backend in ("", backend)
            and self.owner in ("", owner)
            and self.state in ("", state)
        )


def live_jobs(user: AbstractBaseUser | AnonymousUser) -> QuerySet[ReplicaAttempt]:
    """The open attempts of every run that a user can view."""
    attempts = ReplicaAttempt.objects.filter(ended_at=None)
    return attempts if can_view(user) else attempts.none()


def page(
    jobs: QuerySet[ReplicaAttempt], chosen: JobFilter, *, before: str = "", limit: int = PAGE
) -> tuple[list[dict[str, Any]], str]:
    """Rows of one page, and the position of the next ('' on the last).

    A ``before`` that is no position selects the first page.
    """
    jobs = jobs.filter(chosen.condition())
    if is_place(before):
        replica, attempt = map(int, before.split("_"))
        later = Q(replica_id__lt=replica) | Q(replica_id=replica, id__lt=attempt)
        # The redundant condition lets the database start the index scan there.
        jobs = jobs.filter(Q(replica_id__lte=replica) & later)
    found = list(jobs.order_by("-replica_id", "-id").values_list(*_COLUMNS)[: limit + 1])
    rows = [dict(zip(_COLUMNS.values(), values, strict=True)) for values in found]
    after = f"{rows[limit - 1]['replica_id']}_{rows[limit - 1]['id']}" if len(rows) > limit else ""
    return [_row(values) for values in rows[:limit]], after


def is_place(text: str) -> bool:
    return re.fullmatch(PLACE, text) is not None


def _row(values: dict[str, Any]) -> dict[str, Any]:
    row = {**values, "run": str(values["run"]), "url": console_url(values["handle"])}
    for name in ("id", "replica_id", "handle"):
        del row[name]
    for name in ("created_at", "launched_at", "started_at", "deadline_at"):
        row[name] = iso(row[name])
    for name in ("price_usd_h", "cost_usd"):
        row[name] = finite(row[name])
    return row


@dataclass(frozen=True, kw_only=True)
class JobCount:
    """Jobs that share backend, owner and state."""

    backend: str
    owner: str
    state: str
    jobs: int
    running: int
    priced: int
    usd_h: float | None


def counts(jobs: QuerySet[ReplicaAttempt]) -> list[JobCount]:
    """All jobs, counted by backend, owner and state."""
    started = Q(started_at__isnull=False)
    priced = started & Q(price_usd_h__isnull=False)
    rows = (
        jobs.order_by()
        .values_list("replica__pool__backend", "replica__run__owner__username", "replica__state")
        .annotate(
            jobs=Count("id"),
            running=Count("id", filter=started),
            priced=Count("id", filter=priced),
            usd_h=Sum("price_usd_h", filter=priced),
        )
    )
    return [
        JobCount(
            backend=backend,
            owner=owner,
            state=state,
            jobs=number,
            running=running,
            priced=with_price,
            usd_h=finite(usd_h),
        )
        for backend, owner, state, number, running, with_price, usd_h in rows
    ]


def total(counted: Iterable[JobCount], *, backend: str = "", label: str = "") -> dict[str, Any]:
    """The row of a sum (:class:`archipelago.fleet_rows.JobSum`).

    The rate includes only jobs that have started: a job that waits for a machine costs nothing.
    """
    counted = list(counted)
    jobs, running, priced = (
        sum(getattr(c, name) for c in counted) for name in ("jobs", "running", "priced")
    )
    rates = [c.usd_h for c in counted if c.usd_h is not None]
    return {
        "backend": backend,
        "label": label,
        "jobs": jobs,
        "running": running,
        "usd_h": None if running and not priced else finite(sum(rates)),
        "unpriced": running - priced,
    }


def by_backend(counted: Sequence[JobCount], chosen: JobFilter) -> list[dict[str, Any]]:
    """Sums of each backend under the other filters, in the order of the registry."""
    shown = _matching(counted, chosen.but(backend=""))
    known = {name: place for place, name in enumerate(BACKENDS)}
    names = {c.backend for c in shown} | ({chosen.backend} if chosen.backend else set())
    return [
        total(
            (c for c in shown if c.backend == name),
            backend=name,
            label=BACKENDS.get(name, name),
        )
        for name in sorted(names, key=lambda name: (known.get(name, len(known)), name))
    ]


def choices(counted: Sequence[JobCount], chosen: JobFilter, field: str) -> list[tuple[str, int]]:
    """Values of a filter with their jobs under the other filters, the most frequent first."""
    tally: Counter[str] = Counter()
    for c in _matching(counted, chosen.but(**{field: ""})):
        tally[getattr(c, field)] += c.jobs
    if value := getattr(chosen, field):
        tally.setdefault(value, 0)
    return sorted(tally.items(), key=lambda item: (-item[1], item[0]))


def matching_total(counted: Sequence[JobCount], chosen: JobFilter) -> dict[str, Any]:
    """The sum of the jobs that match all filters."""
    return total(_matching(counted, chosen))


def _matching(counted: Iterable[JobCount], chosen: JobFilter) -> list[JobCount]:
    return [c for c in counted if chosen.matches(backend=c.backend, owner=c.owner, state=c.state)]
