"""Webhooks that receive alerts, and the deliveries to them."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models
from django.db.models import Q

from runs.models.run import Run


class Webhook(models.Model):
    """An address that receives alerts.

    ``kinds`` lists kinds of alerts (:data:`runs.alerts.rules.KINDS`). ``sealed`` is the signing
    secret, encrypted by :mod:`runs.credentials`; pages never show it.
    """

    name = models.CharField(max_length=80, unique=True)
    url = models.URLField(max_length=500)
    kinds = models.JSONField(default=list)
    enabled = models.BooleanField(default=True)
    sealed = models.TextField(editable=False)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, editable=False
    )
    created_at = models.DateTimeField(editable=False)

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class WebhookDelivery(models.Model):
    """One message to one webhook, with all its attempts.

    ``body`` is stored byte for byte as signed, so that each attempt sends the same message.
    """

    class State(models.TextChoices):
        WAITING = "waiting"
        DELIVERED = "delivered"
        FAILED = "failed"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    webhook = models.ForeignKey(Webhook, on_delete=models.CASCADE, related_name="deliveries")
    run = models.ForeignKey(Run, on_delete=models.SET_NULL, null=True, related_name="+")
    kind = models.CharField(max_length=24)
    body = models.TextField()
    once = models.CharField(
        max_length=80,
        null=True,
        blank=True,
        help_text="Deduplication key: a webhook gets one message per key",
    )
    state = models.CharField(max_length=16, choices=State.choices, default=State.WAITING)
    attempts = models.PositiveIntegerField(default=0)
    created_at = models.DateTimeField()
    next_at = models.DateTimeField(help_text="Waiting: time of the next attempt")
    tried_at = models.DateTimeField(null=True, blank=True)
    status = models.PositiveIntegerField(null=True, blank=True, help_text="HTTP status, if any")
    message = models.TextField(blank=True, help_text="Result of the latest attempt")

    class Meta:
        ordering = ("-created_at", "-id")
        verbose_name_plural = "webhook deliveries"
        indexes = (
            models.Index(fields=["next_at"], condition=Q(state="waiting"), name="delivery_waiting"),
            models.Index(fields=["-created_at", "-id"], name="delivery_newest"),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(state__in=["waiting", "delivered", "failed"]),
                name="delivery_state_is_known",
            ),
            models.UniqueConstraint(fields=["webhook", "once"], name="delivery_is_made_once"),
        )

    def __str__(self) -> str:
        return f"{self.kind} to {self.webhook}"
