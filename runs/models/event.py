"""Events: the history of a run."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from runs.models.run import Replica, Run


class Event(models.Model):
    """One change of a run or a replica, with its actor and its reason.

    Written in the transaction that changes the state, and never edited.
    """

    class Level(models.TextChoices):
        INFO = "info"
        WARNING = "warning"
        ERROR = "error"

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="events")
    replica = models.ForeignKey(
        Replica, on_delete=models.CASCADE, related_name="events", null=True, blank=True
    )
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, blank=True
    )
    at = models.DateTimeField()
    level = models.CharField(max_length=8, choices=Level.choices, default=Level.INFO)
    kind = models.CharField(max_length=32)
    from_state = models.CharField(max_length=16, blank=True)
    to_state = models.CharField(max_length=16, blank=True)
    message = models.TextField(blank=True)

    class Meta:
        ordering = ("-id",)
        indexes = (models.Index(fields=["run", "-id"], name="event_newest"),)

    def __str__(self) -> str:
        return self.message or f"{self.from_state} -> {self.to_state}"
