"""Budgets that runs share: of an owner, or of a tag."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q


class Budget(models.Model):
    """An amount that the runs of an owner, or with a tag, can spend in each period.

    The control worker evaluates it (:mod:`runs.reconcile.budgets`) and stores the result. Launches
    are refused while ``spent_usd`` of the current period is not below ``amount_usd``.
    """

    class Scope(models.TextChoices):
        OWNER = "owner"
        TAG = "tag"

    class Period(models.TextChoices):
        DAY = "day"
        WEEK = "week"
        MONTH = "month"

    scope = models.CharField(max_length=8, choices=Scope.choices)
    name = models.CharField(max_length=150, help_text="The user name, or the tag")
    period = models.CharField(max_length=8, choices=Period.choices)
    amount_usd = models.FloatField()
    warn_at = models.FloatField(default=0.8, help_text="Share of the amount that opens an alert")
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        editable=False,
        related_name="+",
    )
    changed_at = models.DateTimeField(editable=False)
    # The newest evaluation.
    period_start = models.DateField(null=True, editable=False, help_text="First day, in UTC")
    spent_usd = models.FloatField(default=0, editable=False)
    unpriced_jobs = models.PositiveIntegerField(
        default=0, editable=False, help_text="Jobs of the period without a known price"
    )
    evaluated_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        ordering = ("scope", "name", "period", "id")
        constraints = (
            models.UniqueConstraint(fields=["scope", "name", "period"], name="budget_is_unique"),
            models.CheckConstraint(
                condition=Q(scope__in=["owner", "tag"], period__in=["day", "week", "month"]),
                name="budget_is_known",
            ),
            models.CheckConstraint(
                condition=Q(amount_usd__gte=0, warn_at__gt=0, warn_at__lte=1),
                name="budget_is_in_bounds",
            ),
        )

    def __str__(self) -> str:
        return f"{self.scope} {self.name}, ${self.amount_usd:g} a {self.period}"
