"""Evaluate the budgets of owners and tags: what was spent, and the alerts about it.

A task does this every :data:`EVERY_S` seconds for all runs together. The ticks of runs and the
submission of runs read the stored result (:mod:`runs.backends.budgets`), so running jobs can exceed
a budget by what they cost meanwhile. A budget ends no running job: their runs' own budgets do.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime

from django.db import transaction

from runs import live_stream
from runs.alerts import store
from runs.alerts.rules import Finding, RuleResult
from runs.backends.budgets import first_day, is_exceeded, next_day, spent_now
from runs.models import Alert, Budget
from runs.queries.budgets import Spending, spending_since

EVERY_S = 20.0
KIND = "shared_budget"
"""Kind of the alerts."""


def evaluate_budgets(now: datetime) -> None:
    """Store what was spent of each budget, and open and close the alerts."""
    budgets = list(Budget.objects.all())
    known = {(a.kind, a.subject): a for a in Alert.objects.filter(run=None, closed_at=None)}
    if not budgets and not known:
        return
    today = now.astimezone(UTC).date()
    firsts = {first_day(budget.period, today) for budget in budgets}
    spending = {first: spending_since(first, now) for first in sorted(firsts)}
    for budget in budgets:
        _store(budget, spending, today, now)
    findings = tuple(finding for budget in budgets for finding in _findings(budget, today))
    rewritten = store.outdated(findings, known)
    with transaction.atomic():  # a killed process leaves no open alert without notification
        opened = store.sync(None, RuleResult(findings=findings), known, now=now)
        for alert in opened:
            if alert.notified_at == alert.opened_at:
                store.notify(alert)
    if opened or rewritten or _closed(known.values()):
        live_stream.announce_alerts()


def _closed(alerts: Iterable[Alert]) -> bool:
    return any(alert.closed_at is not None for alert in alerts)


def _store(budget: Budget, spending: dict[date, Spending], today: date, now: datetime) -> None:
    """Store the result, unless the budget was changed meanwhile."""
    first = first_day(budget.period, today)
    spent = spending[first].of(budget)
    budget.period_start, budget.evaluated_at = first, now
    budget.spent_usd, budget.unpriced_jobs = spent.usd, spent.unpriced_jobs
    Budget.objects.filter(pk=budget.pk, changed_at=budget.changed_at).update(
        period_start=first,
        evaluated_at=now,
        spent_usd=spent.usd,
        unpriced_jobs=spent.unpriced_jobs,
    )


def _findings(budget: Budget, today: date) -> list[Finding]:
    """The alerts of a budget that hold now."""
    spent, amount = spent_now(budget, today), budget.amount_usd
    limit = f" of ${amount:,.2f} a {budget.period}"
    text = f"{budget.scope} {budget.name}: ${spent:,.2f}{limit}"
    if is_exceeded(budget, today):
        until = next_day(budget.period, today)
        return [
            Finding(
                kind=KIND,
                subject=f"{budget.pk} exceeded",
                level="error",
                message=f"{text}; nothing is launched before {until} (UTC)",
                limit=limit,
            )
        ]
    if spent >= budget.warn_at * amount:
        message = f"{text}, {spent / amount:.0%}"
        subject = f"{budget.pk} warning"
        return [Finding(kind=KIND, subject=subject, message=message, limit=limit)]
    return []
