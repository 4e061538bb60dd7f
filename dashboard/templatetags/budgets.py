"""Budgets of owners and tags on the pages that they matter to."""

from __future__ import annotations

import uuid
from typing import Any

from django import template
from django.contrib.auth.models import User
from django.utils import timezone

from runs.exceptions import ActionRefused
from runs.queries import budgets
from runs.submit.tags import parse_tags

register = template.Library()


@register.inclusion_tag("partials/budgets.html")
def all_budgets(user: User, owner: str = "") -> dict[str, Any]:
    """All budgets, or those of one owner."""
    rows = budgets.budget_rows(user, now=timezone.now())
    of_owner = [row for row in rows if row["scope"] == "owner" and row["name"] == owner]
    return {"budgets": of_owner if owner else rows}


@register.inclusion_tag("partials/budgets.html")
def own_budgets(user: User, tags: str | None) -> dict[str, Any]:
    """The budgets that a new run of the user counts towards. ``tags`` is the value of a field; of
    one with an error, only those of the user are shown."""
    try:
        valid = parse_tags((tags or "").split())
    except ActionRefused:
        valid = []
    return {"budgets": budgets.rows_of_owner(user, now=timezone.now(), tags=valid)}


@register.inclusion_tag("partials/budget_banners.html")
def budget_banners(run_id: uuid.UUID) -> dict[str, Any]:
    """Banners of a run's budgets that are spent, or nearly."""
    rows = budgets.rows_of_run(run_id, now=timezone.now())
    return {"budgets": [row for row in rows if row["state"] != "ok"]}
