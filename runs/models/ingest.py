"""What ingest has read of a run's bucket, and the records that it could not process."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from runs.models.run import Replica, Run


class IngestState(models.Model):
    """How far ingest has come with one run: control reads it and never the bucket.

    Ingest works in numbered passes. Control asks for a pass that begins later than now by setting
    ``wanted_pass``; no clock is compared for that. All other columns are written by ingest.
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
        default=0, help_text="The newest pass that has read leases, rounds and the final manifest"
    )
    wanted_pass = models.PositiveBigIntegerField(
        default=0, help_text="Control decides on the end of a job after this pass"
    )
    wanted_at = models.DateTimeField(null=True, blank=True)
    reading = models.BooleanField(
        default=False, help_text="A pass is under way; found at a start, the last one was killed"
    )
    careful = models.BooleanField(
        default=False, help_text="Passes read one record at a time and note each before"
    )
    backlog = models.BooleanField(default=False, help_text="A pass has left telemetry unread")
    begun_at = models.DateTimeField(null=True, blank=True)
    complete_at = models.DateTimeField(null=True, blank=True)
    caught_up_at = models.DateTimeField(
        null=True, blank=True, help_text="When a pass last left nothing unread"
    )
    trouble = models.CharField(max_length=8, choices=Trouble.choices, blank=True, default="")
    trouble_since = models.DateTimeField(null=True, blank=True)
    message = models.TextField(blank=True, help_text="Of the trouble")
    observed_s = models.FloatField(
        default=0, help_text="Seconds during which leases were read: silence is measured in these"
    )
    observed_at = models.DateTimeField(null=True, blank=True, help_text="When leases were read")
    progress_s = models.FloatField(
        default=0, help_text="observed_s when a round was last seen to close"
    )
    every_round = models.BooleanField(
        default=True, help_text="The last pass has read every commit there was"
    )
    final_reason = models.CharField(max_length=32, blank=True, help_text="Of the final manifest")
    final_round = models.PositiveIntegerField(default=0)
    quarantined = models.PositiveIntegerField(default=0, help_text="Records that are skipped")
    nonfinite = models.BooleanField(
        default=False,
        help_text="A process of a replica has reported a loss that is NaN or infinite",
    )

    def __str__(self) -> str:
        return f"ingest of {self.run_id}, pass {self.begun_pass}"


class QuarantinedRecord(models.Model):
    """A record of the bucket whose processing has failed; skipped from ``quarantined_at`` on.

    ``failures`` also counts a process that was killed while it processed the record: the row is
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
