"""What runs cost an hour: the prices of their jobs that have started and not ended.

A job that waits for a machine costs nothing. The price of a job can be unknown; the rate is then
that of the other jobs, and a lower bound.
"""

from __future__ import annotations

from typing import Any

from django.db.models import Count, FloatField, IntegerField, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce

from runs.models import ReplicaAttempt
from runs.queries.compiled import CompiledOnce


def running_jobs() -> QuerySet[ReplicaAttempt]:
    """The jobs that cost money now."""
    return ReplicaAttempt.objects.filter(ended_at=None, started_at__isnull=False).order_by()


def unpriced_attempts() -> QuerySet[ReplicaAttempt]:
    """The attempts that a backend has launched and whose price is unknown: their cost is missing in
    the cost of their run."""
    return ReplicaAttempt.objects.filter(price_usd_h=None, launched_at__isnull=False).order_by()


def rate_columns() -> dict[str, Any]:
    """Annotations of runs: ``usd_h``, and ``unpriced_jobs``, those without a known price."""
    jobs = running_jobs().filter(replica__run=OuterRef("pk")).values("replica__run")
    unpriced = jobs.filter(price_usd_h=None).annotate(count=Count("pk")).values("count")
    usd_h = Subquery(jobs.annotate(sum=Sum("price_usd_h")).values("sum"))
    return {
        "usd_h": CompiledOnce(Coalesce(usd_h, 0.0), FloatField()),
        "unpriced_jobs": CompiledOnce(Coalesce(Subquery(unpriced), 0), IntegerField()),
    }


def compare(lookup: str, usd_h: float) -> Q:
    """Condition on the rate of a run; ``lookup`` is ``lt``, ``lte``, ``gt``, ``gte`` or ``exact``.

    An unknown price matches only ``gt`` and ``gte``, if the known ones alone are enough.
    """
    sums = running_jobs().values("replica__run").annotate(sum=Sum("price_usd_h"))
    unpriced = running_jobs().filter(price_usd_h=None).values("replica__run")
    above = Q(pk__in=sums.filter(sum__gt=usd_h).values("replica__run"))
    at_least = Q(pk__in=sums.filter(sum__gte=usd_h).values("replica__run"))
    if usd_h <= 0:
        at_least = Q(pk__isnull=False)  # also a run without jobs
    known = ~Q(pk__in=unpriced)
    return {
        "gt": above,
        "gte": at_least,
        "lt": known & ~at_least,
        "lte": known & ~above,
        "exact": known & at_least & ~above,
    }[lookup]
