"""Spending that the present rows of runs do not show: of deleted runs, and under earlier tags."""

from __future__ import annotations

from django.db import models

from runs.models.run import Run


class TagPeriod(models.Model):
    """The tags that a run had until they were changed. Its spending until then belongs to them."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="tag_periods")
    tags = models.JSONField(default=list)
    until = models.DateTimeField(db_index=True)

    class Meta:
        ordering = ("until", "id")

    def __str__(self) -> str:
        return f"tags of {self.run} until {self.until}"


class RetainedSpend(models.Model):
    """Spending of a deleted run on one day, with the owner and the tags that it had then.

    A run has one row for each day, backend and set of tags. ``run`` is an id without a row of
    :class:`Run`, unless the run was imported again from its bucket. A job is counted on its first
    day.
    """

    run = models.UUIDField(db_index=True)
    run_name = models.CharField(max_length=80)
    owner = models.CharField(max_length=150, help_text="The user name")
    tags = models.JSONField(default=list)
    backend = models.CharField(max_length=64, help_text="Or traffic")
    day = models.DateField(db_index=True, help_text="In UTC")
    usd = models.FloatField(default=0)
    jobs = models.PositiveIntegerField(default=0)
    unpriced_jobs = models.PositiveIntegerField(default=0)
    unpriced_s = models.FloatField(default=0)
    deleted_at = models.DateTimeField()

    class Meta:
        ordering = ("-day", "-id")

    def __str__(self) -> str:
        return f"{self.run_name} on {self.day}"
