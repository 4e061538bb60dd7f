"""Orphaned jobs: running and billed, and part of no attempt."""

from __future__ import annotations

from django.db import models

from runs.models.credential import Credential
from runs.models.run import ReplicaAttempt


class OrphanJob(models.Model):
    """A job that an account runs although no attempt counts on it.

    The reaper adds it when it finds the job, and deletes it once the account no longer lists it.
    """

    key = models.CharField(max_length=64, unique=True, help_text="Digest of backend and handle")
    backend = models.CharField(max_length=32)
    credential = models.ForeignKey(
        Credential,
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="+",
        help_text="Null: the server's own environment",
    )
    launch_key = models.CharField(max_length=80)
    url = models.CharField(
        max_length=500, blank=True, help_text="Its page in the backend's console"
    )
    reason = models.CharField(max_length=80)
    attempt = models.ForeignKey(
        ReplicaAttempt,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
        help_text="The attempt with its launch key, if there is one",
    )
    billed_from = models.DateTimeField(
        help_text="End of its attempt, or the first time that the reaper found it"
    )
    first_seen_at = models.DateTimeField()
    seen_at = models.DateTimeField(help_text="When the reaper last found it")

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"{self.backend} {self.launch_key}"
