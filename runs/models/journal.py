"""How far the journal of a run has been written."""

from __future__ import annotations

from django.db import models

from runs.models.run import Run


class Journal(models.Model):
    """``event_id`` is the newest event that was written, ``seen`` the digest of each row as it was
    written last: what differs is written again. ``due``: something was changed that no tick of the
    reconciler would notice."""

    run = models.OneToOneField(
        Run, on_delete=models.CASCADE, primary_key=True, related_name="journal"
    )
    next_n = models.PositiveIntegerField(default=1)
    event_id = models.PositiveBigIntegerField(default=0)
    seen = models.JSONField(default=dict)
    due = models.BooleanField(default=False)
    marks = models.PositiveBigIntegerField(
        default=0, help_text="How often it was marked as due: one that was marked stays due"
    )
    failures = models.PositiveIntegerField(default=0, help_text="Writes in a row that failed")
    retry_at = models.DateTimeField(
        null=True, blank=True, help_text="After a failed write: when the next is due"
    )

    class Meta:
        indexes = (models.Index(fields=["run"], condition=models.Q(due=True), name="journal_due"),)

    def __str__(self) -> str:
        return f"journal of {self.run_id}"
