"""Telemetry of replicas: read positions, metric points and log lines."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from runs.models.run import Replica, Run


class TelemetryCursor(models.Model):
    """The next telemetry segment of one incarnation, advanced in the transaction that stores it."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="cursors")
    incarnation = models.CharField(max_length=16)
    next_n = models.PositiveIntegerField(default=1)
    ended = models.BooleanField(default=False)
    moved_at = models.DateTimeField(help_text="When it last advanced")
    refused = models.PositiveIntegerField(default=0, help_text="Unreadable segments")
    nonfinite = models.BooleanField(default=False, help_text="A loss was NaN or infinite")

    class Meta:
        indexes = (models.Index(fields=["replica"], condition=Q(ended=False), name="cursor_open"),)
        constraints = (
            models.UniqueConstraint(
                fields=["replica", "incarnation"], name="one_cursor_per_incarnation"
            ),
        )

    def __str__(self) -> str:
        return f"{self.replica} {self.incarnation} @ {self.next_n}"


class MetricBlock(models.Model):
    """Many points of one series in one row, packed by :mod:`runs.metrics.blocks`.

    Attributes:
        replica: null for a series of the whole run, such as ``eval_loss``.
        level: 0 for the points themselves, k for the downsampled points of buckets of 2**k keys.
        index: position of the block: its first key divided by the width of a block of its level.
        count: number of points in the block, or below it in level 0.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="metric_blocks")
    replica = models.ForeignKey(
        Replica, on_delete=models.CASCADE, related_name="metric_blocks", null=True
    )
    series = models.CharField(max_length=100)
    level = models.PositiveSmallIntegerField(default=0)
    index = models.PositiveIntegerField()
    count = models.PositiveIntegerField(default=0)
    data = models.BinaryField()

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=["run", "replica", "series", "level", "index"],
                name="metric_block_of_replica_is_unique",
            ),
            models.UniqueConstraint(
                fields=["run", "series", "level", "index"],
                condition=Q(replica__isnull=True),
                name="metric_block_of_run_is_unique",
            ),
        )

    def __str__(self) -> str:
        return f"{self.series} block {self.index}"


class LogLine(models.Model):
    """A log line that a replica wrote to its telemetry."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="log_lines")
    incarnation = models.CharField(max_length=16)
    at = models.DateTimeField()
    level = models.CharField(max_length=8)
    message = models.TextField()

    class Meta:
        ordering = ("id",)

    def __str__(self) -> str:
        return self.message
