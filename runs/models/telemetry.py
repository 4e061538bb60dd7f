"""What replicas report through the bucket: how far it is read, numbers and lines."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from runs.models.run import Replica, Run


class TelemetryCursor(models.Model):
    """The next segment to read of one incarnation; moves in the transaction that stores it."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="cursors")
    incarnation = models.CharField(max_length=16)
    next_n = models.PositiveIntegerField(default=1)
    ended = models.BooleanField(default=False)
    moved_at = models.DateTimeField(help_text="When it last moved")
    refused = models.PositiveIntegerField(default=0, help_text="Segments that were unreadable")
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
    """Many points of one series in one row.

    ``replica`` is null for series of the whole run (``eval_loss``). ``level`` 0 holds the points as
    they came; level k will hold one bucket (last, min, max) per 2**k points, which is why points
    are grouped by ``index`` = first x // :data:`runs.metrics.blocks.BLOCK_STEPS` and stay put as
    data is appended. ``data`` is packed by :mod:`runs.metrics.blocks`.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="metric_blocks")
    replica = models.ForeignKey(
        Replica, on_delete=models.CASCADE, related_name="metric_blocks", null=True
    )
    series = models.CharField(max_length=32)
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
    """A line a replica wrote through its telemetry."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="log_lines")
    incarnation = models.CharField(max_length=16)
    at = models.DateTimeField()
    level = models.CharField(max_length=8)
    message = models.TextField()

    class Meta:
        ordering = ("id",)

    def __str__(self) -> str:
        return self.message
