"""Alerts: conditions that need attention, and how far each user has read them."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q

from runs.models.run import Replica, Run


class Alert(models.Model):
    """One condition of a run: unique by run, kind and subject. The alert of a budget that several
    runs share has no run.

    An alert that opens again reuses its row: ``times`` counts, and ``opened_at`` and ``closed_at``
    describe the latest occurrence. :mod:`runs.alerts.store` writes the rows.
    """

    run = models.ForeignKey(
        Run,
        on_delete=models.CASCADE,
        related_name="alerts",
        null=True,
        blank=True,
        help_text="Null: several runs share its cause",
    )
    replica = models.ForeignKey(
        Replica, on_delete=models.CASCADE, related_name="alerts", null=True, blank=True
    )
    kind = models.CharField(max_length=24)
    subject = models.CharField(
        max_length=40, blank=True, help_text="Distinguishes alerts of one kind"
    )
    level = models.CharField(max_length=8)
    message = models.TextField()
    first_at = models.DateTimeField()
    opened_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True, blank=True, help_text="Null: open")
    times = models.PositiveIntegerField(default=1)
    notified_at = models.DateTimeField(
        null=True, blank=True, help_text="When webhooks were last notified"
    )
    acknowledged_at = models.DateTimeField(null=True, blank=True)
    acknowledged_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, blank=True, related_name="+"
    )

    class Meta:
        ordering = ("-opened_at", "-id")
        constraints = (
            models.UniqueConstraint(fields=["run", "kind", "subject"], name="alert_is_kept_once"),
            # SQL counts null run ids as different.
            models.UniqueConstraint(
                fields=["kind", "subject"],
                condition=Q(run__isnull=True),
                name="shared_alert_is_kept_once",
            ),
        )
        indexes = (
            models.Index(
                fields=["run"],
                condition=Q(closed_at__isnull=True, acknowledged_at__isnull=True),
                name="alert_waits",
            ),
            models.Index(fields=["run"], condition=Q(closed_at__isnull=True), name="alert_open"),
            models.Index(fields=["-opened_at", "-id"], name="alert_newest"),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}".strip()


class AlertsRead(models.Model):
    """How far a user has read the alerts: those that opened later are unread."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="alerts_read"
    )
    read_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.user} until {self.read_at:%Y-%m-%d %H:%M:%S}"
