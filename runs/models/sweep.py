"""Sweeps: runs that differ in the values of a few fields."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models

from runs.models import money


class Sweep(models.Model):
    """A sweep, and the limits of its runs together.

    ``parameters`` is a list of ``{"field": "settings.inner_lr", "values": [...]}``. At most
    ``parallel`` of its runs work at a time; the others are held (:attr:`Run.sweep_held`).
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=80)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="sweeps"
    )
    parameters = models.JSONField()
    metric = models.CharField(max_length=32, help_text="Ranks the runs")
    parallel = models.PositiveIntegerField(default=0, help_text="0 means no limit")
    budget_usd = models.FloatField(
        validators=money.COST, default=0, help_text="Of all its runs; 0 means no limit"
    )
    deleted_usd = models.FloatField(default=0, help_text="Cost of its deleted runs")
    submit_key = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ("-created_at", "-id")
        indexes = (models.Index(fields=["-created_at", "-id"], name="sweep_newest"),)

    def __str__(self) -> str:
        return self.name
