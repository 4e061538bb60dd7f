"""Figures above the runs list: how many runs each tab has, and what the listed runs use and cost.

Unlike a page of the list, they read all matching runs, so the page loads them after its rows. What
runs use is summed up for the few runs with jobs, spending of today or alerts, from which the listed
ones are selected.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Count, Q, QuerySet, Sum

from archipelago.rows import RunTotals
from runs.backends import executors
from runs.json_values import finite
from runs.models import Alert, Run
from runs.queries import budgets, rates
from runs.queries.search import Term, matching
from runs.queries.spend import RUNS_AT_ONCE
from runs.states import RUN_ACTIVE, RunState
from runs.times import in_utc

TABS = {"active": "is:active", "mine": "is:mine", "failed": "state:failed", "all": ""}
"""Tab -> its term. A tab adds its term to the other terms of the query."""


@dataclass
class _Jobs:
    """The running jobs of one run."""

    gpus: int = 0
    gpus_known: bool = True
    usd_h: float = 0.0
    usd_h_known: bool = True


def tabs_of(terms: Sequence[Term]) -> list[str]:
    """The tabs that the query selects."""
    words = {term.word.lower() for term in terms}
    return [tab for tab, word in TABS.items() if word in words] or ["all"]


def without_tabs(terms: Sequence[Term]) -> tuple[Term, ...]:
    """The terms that are not those of a tab."""
    return tuple(term for term in terms if term.word.lower() not in TABS.values())


def query_of(tab: str, terms: Sequence[Term]) -> str:
    """The query of a tab."""
    return " ".join([*(term.word for term in without_tabs(terms)), TABS[tab]]).strip()


def totals(runs: QuerySet[Run], *, now: datetime) -> RunTotals:
    """The totals of runs without annotations. The number of queries is constant for 10,000 runs
    with jobs, spending of today or alerts."""
    runs = runs.order_by()
    is_active = Q(state__in=sorted(RUN_ACTIVE))
    sums = runs.aggregate(
        runs=Count("pk"), active=Count("pk", filter=is_active), usd=Sum("cost_usd")
    )
    unknown = runs.filter(pk__in=rates.unpriced_attempts().values("replica__run"))
    jobs, alerts = _jobs(), _alerts()
    today, complete = budgets.spent_by_run(in_utc(now).date(), now)
    listed = _listed(runs, {*jobs, *today, *alerts})
    running = [job for run, job in jobs.items() if run in listed]
    spent = [tally for run, tally in today.items() if run in listed]
    return RunTotals(
        runs=sums["runs"],
        active=sums["active"],
        gpus=sum(job.gpus for job in running),
        gpus_known=all(job.gpus_known for job in running),
        usd_h=sum(job.usd_h for job in running),
        usd_h_known=all(job.usd_h_known for job in running),
        today_usd=finite(sum(tally.usd for tally in spent)) or 0.0,
        today_known=complete and not any(tally.unpriced_jobs for tally in spent),
        cost_usd=finite(sums["usd"]) or 0.0,
        cost_known=finite(sums["usd"] or 0.0) is not None and not unknown.exists(),
        alerts=sum(number for run, number in alerts.items() if run in listed),
    )


def _jobs() -> dict[uuid.UUID, _Jobs]:
    """The running jobs of every run, with the GPUs and the price of their hardware."""
    catalogue = executors.deployed()
    rows = rates.running_jobs().values_list(
        "replica__run", "replica__pool__backend", "replica__pool__hardware"
    )
    counted = rows.annotate(jobs=Count("pk"), priced=Count("price_usd_h"), usd=Sum("price_usd_h"))
    found: dict[uuid.UUID, _Jobs] = {}
    for run, backend, name, jobs, priced, usd_h in counted:
        of_run, hardware = found.setdefault(run, _Jobs()), catalogue.get(backend, name)
        of_run.gpus += jobs * hardware.gpus if hardware else 0
        of_run.gpus_known &= hardware is not None
        of_run.usd_h += finite(usd_h) or 0.0
        of_run.usd_h_known &= jobs == priced
    return found


def _alerts() -> dict[uuid.UUID, int]:
    """The open alerts of every run."""
    rows = Alert.objects.filter(closed_at=None, run__isnull=False).order_by()
    return dict(rows.values_list("run").annotate(number=Count("pk")))


def _listed(runs: QuerySet[Run], found: Collection[uuid.UUID]) -> set[uuid.UUID]:
    """Those of the runs found that are listed."""
    ids, listed = list(found), set[uuid.UUID]()
    for at in range(0, len(ids), RUNS_AT_ONCE):
        listed.update(runs.filter(pk__in=ids[at : at + RUNS_AT_ONCE]).values_list("pk", flat=True))
    return listed


def tab_counts(terms: Sequence[Term], *, user: Any) -> dict[str, int]:
    """The number of runs of each tab."""
    runs = matching(Run.objects.order_by(), without_tabs(terms), user=user)
    conditions = {
        "active": Q(state__in=sorted(RUN_ACTIVE)),
        "mine": Q(owner=user),
        "failed": Q(state=RunState.FAILED),
        "all": Q(),
    }
    counts = {
        tab: Count("pk", filter=condition) if condition else Count("pk")
        for tab, condition in conditions.items()
    }
    return dict(runs.aggregate(**counts))
