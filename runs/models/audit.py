"""The audit log: actor, action, time and client address."""

from __future__ import annotations

from django.db import models


class AuditEntry(models.Model):
    """One action. The table is append-only (:mod:`runs.audit`): database triggers refuse updates
    and deletions, and each row holds the hash of the previous row.

    ``actor`` is a name instead of a foreign key, so that the entry outlives the account.
    """

    at = models.DateTimeField()
    actor = models.CharField(max_length=150, blank=True)
    address = models.CharField(max_length=64, blank=True)
    action = models.CharField(max_length=64)
    target = models.CharField(max_length=200, blank=True)
    detail = models.TextField(blank=True)
    previous_hash = models.CharField(max_length=64)
    hash = models.CharField(max_length=64, unique=True)

    class Meta:
        ordering = ("-id",)
        verbose_name_plural = "audit log"

    def __str__(self) -> str:
        return f"{self.at:%Y-%m-%d %H:%M:%S} {self.actor or 'unknown'}: {self.action}"
