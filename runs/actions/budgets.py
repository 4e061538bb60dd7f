"""Set and remove budgets of owners and tags. The caller checks the role."""

from __future__ import annotations

import math

from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from runs import audit
from runs.actions.saving import AlreadyUsed, DeletedMeanwhile, save
from runs.exceptions import ActionRefused, InvalidRun
from runs.models import Budget
from runs.submit.tags import TAG_LENGTH, parse_tags
from runs.task_queue import enqueue

MOST = 500
LEAST_USD, MOST_USD = 0.01, 1e9
DEFAULT_WARN = 0.8


def save_budget(
    *,
    scope: str,
    name: str,
    period: str,
    amount_usd: float,
    warn_at: float = DEFAULT_WARN,
    actor: User,
    budget: Budget | None = None,
) -> Budget:
    """Create a budget, or change one. A worker evaluates it within seconds.

    Raises :class:`InvalidRun` with the name of the wrong field.
    """
    name = name.strip()
    subject = (scope, name, period)
    is_same = budget and (budget.scope, budget.name, budget.period) == subject
    _check(scope, name, period, amount_usd, warn_at)
    if budget is None and Budget.objects.count() >= MOST:
        raise InvalidRun("", f"expected at most {MOST} budgets, found that many: delete some")
    row = budget or Budget(created_by=actor)
    row.scope, row.name, row.period = scope, name, period
    row.amount_usd, row.warn_at, row.changed_at = amount_usd, warn_at, timezone.now()
    if not is_same:  # otherwise a spent budget would allow launches until it is evaluated
        row.evaluated_at = row.period_start = None
    try:
        with transaction.atomic():
            save(row)
            detail = f"${amount_usd:g} a {period}, warning at {warn_at:.0%}"
            audit.record("budget.saved", actor=actor, target=f"{scope} {name}", detail=detail)
            enqueue("evaluate_budgets")
    except AlreadyUsed:
        message = f"expected no other budget of {scope} {name} a {period}, found one: change it"
        raise InvalidRun("name", message) from None
    except DeletedMeanwhile:
        raise InvalidRun("", "the budget has been deleted meanwhile") from None
    return row


def delete_budget(budget: Budget, *, actor: User) -> None:
    with transaction.atomic():
        audit.record("budget.deleted", actor=actor, target=str(budget))
        Budget.objects.filter(pk=budget.pk).delete()
        enqueue("evaluate_budgets")


def _check_tag(name: str) -> None:
    """Refuse a tag that no run can have: the budget would have no effect."""
    try:
        tags = parse_tags([name])
    except ActionRefused as error:
        raise InvalidRun("name", str(error)) from None
    if not tags:
        raise InvalidRun("name", f"expected a tag of 1 to {TAG_LENGTH} characters")


def _check(scope: str, name: str, period: str, amount_usd: float, warn_at: float) -> None:
    if scope not in Budget.Scope.values:
        expected = " or ".join(Budget.Scope.values)
        raise InvalidRun("scope", f"expected {expected}, found {scope!r}")
    if period not in Budget.Period.values:
        expected = ", ".join(Budget.Period.values)
        raise InvalidRun("period", f"expected {expected}, found {period!r}")
    if scope == Budget.Scope.OWNER and not User.objects.filter(username=name).exists():
        raise InvalidRun("name", f"expected the name of a user, found {name!r}")
    if scope == Budget.Scope.TAG:
        _check_tag(name)
    is_amount = amount_usd == 0 or LEAST_USD <= amount_usd <= MOST_USD
    if not (math.isfinite(amount_usd) and is_amount):
        expected = f"0, or {LEAST_USD} to {MOST_USD:,.0f} USD"
        raise InvalidRun("amount_usd", f"expected {expected}, found {amount_usd}")
    if not 0 < warn_at <= 1:
        raise InvalidRun("warn_at", f"expected more than 0, at most 1, found {warn_at}")
