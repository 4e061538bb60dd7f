"""The audit log: who did what, when and from where."""

from __future__ import annotations

from django.db import models


class AuditEntry(models.Model):
    """One action. Rows are only added (:mod:`runs.audit`): triggers of the database refuse changes
    and deletions, and every row holds the hash of the one before.

    ``actor`` is a name and no foreign key, so that the entry outlives the account.
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
