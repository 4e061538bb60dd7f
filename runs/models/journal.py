"""Progress of writing a run's journal to its bucket."""

from __future__ import annotations

from django.db import models

from runs.models.run import Run


class Journal(models.Model):
    """Write position of one run's journal.

    Attributes:
        event_id: the newest event that was written.
        seen: digest of each row as last written; a row with another digest is written again.
        due: a change is waiting that no tick of the reconciler would notice.
    """

    run = models.OneToOneField(
        Run, on_delete=models.CASCADE, primary_key=True, related_name="journal"
    )
    next_n = models.PositiveIntegerField(default=1)
    event_id = models.PositiveBigIntegerField(default=0)
    seen = models.JSONField(default=dict)
    due = models.BooleanField(default=False)
    marks = models.PositiveBigIntegerField(
        default=0, help_text="Times it was marked due; a mark during a write keeps it due"
    )
    failures = models.PositiveIntegerField(default=0, help_text="Consecutive failed writes")
    retry_at = models.DateTimeField(
        null=True, blank=True, help_text="After a failed write: when to retry"
    )

    class Meta:
        indexes = (models.Index(fields=["run"], condition=models.Q(due=True), name="journal_due"),)

    def __str__(self) -> str:
        return f"journal of {self.run_id}"
