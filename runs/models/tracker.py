"""Experiment trackers, and the runs that are mirrored to them."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models
from django.db.models import Q

from runs.models.run import Run


class ExperimentTracker(models.Model):
    """A place that runs can be mirrored to.

    ``kind`` is a key of :data:`diloco.trackers.opening.KINDS`. ``sealed`` has its secrets,
    encrypted by :mod:`runs.credentials`; pages never show them."""

    name = models.CharField(max_length=80, unique=True)
    kind = models.CharField(max_length=32)
    server = models.CharField(max_length=500, blank=True)
    project = models.CharField(max_length=200, blank=True)
    enabled = models.BooleanField(default=True)
    sealed = models.TextField(editable=False, blank=True)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, editable=False
    )
    created_at = models.DateTimeField(editable=False)

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class RunMirror(models.Model):
    """The copy of one run's metrics in one tracker.

    Attributes:
        positions: ``<replica number>/<series>`` (``/<series>`` for the run) -> largest key
            delivered.
        number: rows delivered so far; the number of the next row.
        pending: rows that are being delivered, stored before the first attempt, so that each
            further attempt delivers the same; with ``positions`` after them. Null: none.
        remote: the state of the tracker's client (:class:`diloco.trackers.base.Tracker`).
    """

    class State(models.TextChoices):
        ACTIVE = "active"
        FINISHED = "finished"
        STOPPED = "stopped"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="mirrors")
    tracker = models.ForeignKey(ExperimentTracker, on_delete=models.CASCADE, related_name="mirrors")
    state = models.CharField(max_length=16, choices=State.choices, default=State.ACTIVE)
    positions = models.JSONField(default=dict)
    number = models.PositiveBigIntegerField(default=0)
    points = models.PositiveBigIntegerField(default=0, help_text="Values delivered so far")
    pending = models.JSONField(null=True)
    remote = models.JSONField(default=dict)
    started = models.BooleanField(default=False, help_text="The tracker has the run")
    outcome_sent = models.BooleanField(default=False, help_text="The tracker has the run's end")
    failures = models.PositiveIntegerField(default=0, help_text="Consecutive failed passes")
    message = models.TextField(blank=True, help_text="Error of the latest pass, if it failed")
    next_at = models.DateTimeField(help_text="Active: when the next pass is due")
    delivered_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ("created_at", "id")
        indexes = (
            models.Index(fields=["next_at"], condition=Q(state="active"), name="mirror_active"),
        )
        constraints = (
            models.UniqueConstraint(fields=["run", "tracker"], name="one_mirror_per_tracker"),
            models.CheckConstraint(
                condition=Q(state__in=["active", "finished", "stopped"]),
                name="mirror_state_is_known",
            ),
        )

    def __str__(self) -> str:
        return f"{self.run} in {self.tracker}"
