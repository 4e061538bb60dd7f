"""Progress of ingest through a run's bucket, and the records that it could not process."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from runs.models.run import Replica, Run


class IngestState(models.Model):
    """Ingest progress of one run. Control reads this row and never the bucket.

    Ingest works in numbered passes. Control requests a pass that begins later than now by setting
    ``wanted_pass``, which needs no comparison of clocks. Ingest writes all other columns.
    """

    class Trouble(models.TextChoices):
        NONE = ""
        AWAY = "away"
        DENIED = "denied"
        FAILED = "failed"

    run = models.OneToOneField(
        Run, on_delete=models.CASCADE, primary_key=True, related_name="ingest"
    )
    begun_pass = models.PositiveBigIntegerField(default=0, help_text="The newest pass")
    complete_pass = models.PositiveBigIntegerField(
        default=0, help_text="The newest pass that read leases, rounds and the final manifest"
    )
    wanted_pass = models.PositiveBigIntegerField(
        default=0, help_text="Control decides about an ended job after this pass"
    )
    wanted_at = models.DateTimeField(null=True, blank=True)
    reading = models.BooleanField(
        default=False,
        help_text="A pass is running; if set when a pass begins, the previous one was killed",
    )
    careful = models.BooleanField(
        default=False, help_text="Passes read one record at a time and store its key first"
    )
    backlog = models.BooleanField(default=False, help_text="The last pass left telemetry unread")
    begun_at = models.DateTimeField(null=True, blank=True)
    complete_at = models.DateTimeField(null=True, blank=True)
    caught_up_at = models.DateTimeField(
        null=True, blank=True, help_text="When a pass last read all telemetry"
    )
    trouble = models.CharField(max_length=8, choices=Trouble.choices, blank=True, default="")
    trouble_since = models.DateTimeField(null=True, blank=True)
    message = models.TextField(blank=True, help_text="Details of the trouble")
    observed_s = models.FloatField(
        default=0, help_text="Seconds during which leases were read; measures a replica's silence"
    )
    observed_at = models.DateTimeField(null=True, blank=True, help_text="When leases were read")
    progress_s = models.FloatField(default=0, help_text="observed_s when a round last closed")
    every_round = models.BooleanField(
        default=True, help_text="The last pass read every existing commit"
    )
    final_reason = models.CharField(max_length=32, blank=True, help_text="From the final manifest")
    final_round = models.PositiveIntegerField(default=0)
    quarantined = models.PositiveIntegerField(default=0, help_text="Number of skipped records")
    nonfinite = models.BooleanField(
        default=False,
        help_text="A replica process reported a loss that is NaN or infinite",
    )

    def __str__(self) -> str:
        return f"ingest of {self.run_id}, pass {self.begun_pass}"


class QuarantinedRecord(models.Model):
    """A record of the bucket that could not be processed; skipped from ``quarantined_at`` on.

    ``failures`` includes processes that were killed while they processed the record: the row is
    written before the record is parsed (:mod:`runs.ingest.quarantine`).
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="quarantined")
    replica = models.ForeignKey(
        Replica, on_delete=models.CASCADE, related_name="quarantined", null=True, blank=True
    )
    incarnation = models.CharField(max_length=16, blank=True)
    key = models.CharField(max_length=300)
    size_bytes = models.PositiveBigIntegerField(null=True, blank=True)
    reason = models.TextField(blank=True)
    failures = models.PositiveIntegerField(default=0)
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()
    quarantined_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("-last_at", "-id")
        constraints = (
            models.UniqueConstraint(fields=["run", "key"], name="quarantined_record_is_unique"),
        )
        indexes = (
            models.Index(
                fields=["run"], condition=Q(quarantined_at__isnull=False), name="record_quarantined"
            ),
        )

    def __str__(self) -> str:
        return self.key
