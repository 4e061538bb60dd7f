"""Budgets of owners and tags: their periods, and whether they refuse launches.

A budget is evaluated every :data:`runs.reconcile.budgets.EVERY_S`; a check reads the newest result.
Spending of an earlier period counts no more, so launches resume with the next one on their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta

from django.contrib.auth.models import User
from django.db.models import Q

from runs.json_values import texts
from runs.models import Budget, Run

Period = Budget.Period


def first_day(period: str, today: date) -> date:
    """The first day of the current period. Weeks begin on Monday; days are in UTC."""
    if period == Period.WEEK:
        return today - timedelta(days=today.weekday())
    return today.replace(day=1) if period == Period.MONTH else today


def next_day(period: str, today: date) -> date:
    """The first day of the next period."""
    first = first_day(period, today)
    if period == Period.MONTH:
        return (first + timedelta(days=32)).replace(day=1)
    return first + timedelta(days=7 if period == Period.WEEK else 1)


def budgets_of(owner_id: int, tags: Sequence[str]) -> list[Budget]:
    """The budgets that apply to a run. One query."""
    names = User.objects.filter(pk=owner_id).values("username")
    of_owner = Q(scope=Budget.Scope.OWNER, name__in=names)
    return list(Budget.objects.filter(of_owner | Q(scope=Budget.Scope.TAG, name__in=tags)))


def spent_now(budget: Budget, today: date) -> float:
    """Amount spent in the current period, as of the newest evaluation."""
    is_current = budget.period_start == first_day(budget.period, today)
    return budget.spent_usd if is_current else 0.0


def is_exceeded(budget: Budget, today: date) -> bool:
    return spent_now(budget, today) >= budget.amount_usd


def refusal(owner_id: int, tags: Sequence[str], now: datetime) -> str:
    """Why a run of this owner with these tags cannot launch; '' if it can. One query."""
    today = now.astimezone(UTC).date()
    exceeded = [b for b in budgets_of(owner_id, tags) if is_exceeded(b, today)]
    return why_refused(exceeded[0], today) if exceeded else ""


def refusal_of(run: Run, now: datetime) -> str:
    """:func:`refusal` for a run."""
    return refusal(run.owner_id, texts(run.tags), now)


def why_refused(budget: Budget, today: date) -> str:
    return (
        f"the budget of {budget.scope} {budget.name} is spent: ${spent_now(budget, today):,.2f} of "
        f"${budget.amount_usd:,.2f} a {budget.period}. Launches resume on "
        f"{next_day(budget.period, today)} (UTC), or when an administrator raises the budget"
    )
