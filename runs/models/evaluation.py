"""Evaluations of a run's checkpoints, and the backend job of each attempt."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q

from runs.models.credential import Credential
from runs.models.run import Run


class EvaluationPlan(models.Model):
    """Measurement of the checkpoints of a run: what, how often, and where.

    Attributes:
        spec: :class:`diloco.protocol.evaluation.EvaluationSpec` as an object.
        every: each ``every``-th checkpoint, and the final weights; 0: only on request.
        timeout_s: time limit of one attempt.
        enabled: False for a removed plan, which remains for the costs of its jobs.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="evaluation_plans")
    name = models.CharField(max_length=24)
    spec = models.JSONField()
    every = models.PositiveIntegerField(default=1)
    backend = models.CharField(max_length=32)
    hardware = models.CharField(max_length=64, default="cpu")
    credential = models.ForeignKey(
        Credential, on_delete=models.PROTECT, null=True, blank=True, related_name="evaluations"
    )
    timeout_s = models.PositiveIntegerField(default=3600)
    max_attempts = models.PositiveSmallIntegerField(default=3)
    enabled = models.BooleanField(default=True)
    considered = models.PositiveIntegerField(
        default=0, help_text="Checkpoints of the run for which evaluations were queued or not"
    )
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, related_name="+"
    )
    created_at = models.DateTimeField()

    class Meta:
        ordering = ("created_at", "id")
        constraints = (
            models.UniqueConstraint(fields=["run", "name"], name="evaluation_plan_name_is_unique"),
        )

    def __str__(self) -> str:
        return self.name


class Evaluation(models.Model):
    """One evaluation of the weights after one round.

    Attributes:
        metrics: name -> ``[value, standard error or null]``; null before it has succeeded.
        next_at: when the next step of an active evaluation is due.
        retrying_since: since when each step fails because a backend or bucket is unavailable.
    """

    class State(models.TextChoices):
        QUEUED = "queued"
        RUNNING = "running"
        CANCELLING = "cancelling"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        CANCELLED = "cancelled"
        SKIPPED = "skipped"

    ACTIVE = (State.QUEUED, State.RUNNING, State.CANCELLING)
    WITH_JOB = (State.RUNNING, State.CANCELLING)

    plan = models.ForeignKey(EvaluationPlan, on_delete=models.CASCADE, related_name="evaluations")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="evaluations")
    round = models.PositiveIntegerField()
    state = models.CharField(max_length=16, choices=State.choices, default=State.QUEUED)
    message = models.TextField(blank=True)
    metrics = models.JSONField(null=True, blank=True)
    tokens = models.PositiveBigIntegerField(default=0, help_text="Tokens whose loss was measured")
    data_digest = models.CharField(max_length=64, blank=True)
    failures = models.PositiveSmallIntegerField(
        default=0, help_text="Failed attempts since it was queued or retried"
    )
    harness = models.CharField(max_length=32, blank=True, help_text="Version of lm-eval")
    device = models.CharField(max_length=80, blank=True)
    created_at = models.DateTimeField()
    next_at = models.DateTimeField()
    retrying_since = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("-round", "plan_id")
        indexes = (
            models.Index(
                fields=["next_at"],
                condition=Q(state__in=["queued", "running", "cancelling"]),
                name="evaluation_active",
            ),
        )
        constraints = (
            models.UniqueConstraint(fields=["plan", "round"], name="one_evaluation_per_round"),
            models.CheckConstraint(
                condition=Q(
                    state__in=[
                        *("queued", "running", "cancelling"),
                        *("succeeded", "failed", "cancelled", "skipped"),
                    ]
                ),
                name="evaluation_state_is_known",
            ),
        )

    def __str__(self) -> str:
        return f"{self.plan} of round {self.round}"


class EvaluationAttempt(models.Model):
    """One backend job of an evaluation. The launch key is stored before the backend is called.

    ``log`` is the end of the job's output, read when it has ended.
    """

    evaluation = models.ForeignKey(Evaluation, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    launch_key = models.CharField(max_length=80, unique=True)
    handle = models.JSONField(null=True, blank=True)
    cause = models.CharField(max_length=16, blank=True)
    exit_code = models.IntegerField(null=True, blank=True)
    message = models.TextField(blank=True)
    log = models.TextField(blank=True)
    created_at = models.DateTimeField()
    launched_at = models.DateTimeField(null=True, blank=True)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    price_usd_h = models.FloatField(null=True, blank=True)
    cost_usd = models.FloatField(null=True, blank=True, help_text="Null: the price is unknown")

    class Meta:
        ordering = ("number",)
        indexes = (
            models.Index(
                fields=["evaluation"],
                condition=Q(ended_at__isnull=True),
                name="evaluation_attempt_open",
            ),
            models.Index(
                fields=["ended_at"],
                condition=Q(ended_at__isnull=False),
                name="evaluation_attempt_ended",
            ),
        )
        constraints = (
            models.UniqueConstraint(
                fields=["evaluation", "number"], name="evaluation_attempt_is_unique"
            ),
        )

    def __str__(self) -> str:
        return self.launch_key
