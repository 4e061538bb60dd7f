"""Numbers above the runs list: how many runs each tab has, and what the listed runs cost.

Unlike a page of the list, they read all matching runs, so the page loads them after its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Count, Q, Sum

from runs.json_values import finite
from runs.models import Run
from runs.queries import rates
from runs.queries.search import Term, matching
from runs.states import RUN_ACTIVE, RunState

TABS = {"active": "is:active", "mine": "is:mine", "failed": "state:failed", "all": ""}
"""Tab -> its term. A tab adds its term to the other terms of the query."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """``tabs``: runs by tab. ``runs`` match the query; an amount that is not *known* is a lower
    bound, because a price is unknown."""

    tabs: dict[str, int]
    runs: int
    cost_usd: float
    cost_known: bool
    usd_h: float
    usd_h_known: bool


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


def totals(terms: Sequence[Term], *, user: Any) -> Totals:
    """Four queries, whatever the number of runs."""
    runs = matching(Run.objects.order_by(), terms, user=user)
    spent = runs.aggregate(count=Count("pk"), usd=Sum("cost_usd"))
    # From the few runs with jobs or without prices, not from all matching runs.
    busy = runs.filter(pk__in=rates.running_jobs().values("replica__run"))
    jobs = rates.running_jobs().filter(replica__run__in=busy.values("pk"))
    unpriced = Count("pk", filter=Q(price_usd_h=None))
    rate = jobs.aggregate(usd_h=Sum("price_usd_h"), unpriced=unpriced)
    unknown = runs.filter(pk__in=rates.unpriced_attempts().values("replica__run"))
    return Totals(
        tabs=_tab_counts(terms, user),
        runs=spent["count"],
        cost_usd=finite(spent["usd"]) or 0.0,
        cost_known=not unknown.exists(),
        usd_h=finite(rate["usd_h"]) or 0.0,
        usd_h_known=not rate["unpriced"],
    )


def _tab_counts(terms: Sequence[Term], user: Any) -> dict[str, int]:
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
