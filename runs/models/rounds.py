"""Rounds, their contributions, and the checkpoints written after them."""

from __future__ import annotations

from django.db import models

from runs.models.run import Replica, Run
from runs.states import ContributionState, RoundState


class Round(models.Model):
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="rounds")
    number = models.PositiveIntegerField()
    fragment = models.PositiveIntegerField(default=0)
    state = models.CharField(
        max_length=16, choices=RoundState.choices, default=RoundState.COLLECTING
    )
    reason = models.TextField(blank=True)
    mode = models.CharField(max_length=16, blank=True)
    contributors = models.PositiveIntegerField(default=0)
    tokens_total = models.PositiveBigIntegerField(default=0)
    loss = models.FloatField(null=True, blank=True)
    eval_loss = models.FloatField(null=True, blank=True)
    weights_digest = models.CharField(max_length=64, blank=True)
    digest_mismatch = models.BooleanField(
        default=False, help_text="Replicas disagree about the weights after this round"
    )
    planned_at = models.DateTimeField(null=True, blank=True)
    committed_at = models.DateTimeField(null=True, blank=True)
    # Packed by runs.metrics.round_strips, indexed by replica number.
    outcomes = models.BinaryField(default=b"", help_text="One byte per replica")
    timings = models.BinaryField(default=b"", help_text="Start and phase durations, per replica")
    lateness = models.BinaryField(default=b"", help_text="Seconds, per late replica")
    cosines = models.BinaryField(default=b"", help_text="Cosine to the mean, per replica")

    class Meta:
        ordering = ("number",)
        constraints = (
            models.UniqueConstraint(fields=["run", "number"], name="round_number_is_unique"),
        )

    def __str__(self) -> str:
        return f"round {self.number}"


class Contribution(models.Model):
    """One replica's contribution to one round, with the duration of each phase in seconds."""

    round = models.ForeignKey(Round, on_delete=models.CASCADE, related_name="contributions")
    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="contributions")
    incarnation = models.CharField(max_length=16)
    state = models.CharField(
        max_length=16, choices=ContributionState.choices, default=ContributionState.UPLOADED
    )
    reason = models.TextField(blank=True)
    base_round = models.PositiveIntegerField(default=0)
    tokens = models.PositiveBigIntegerField(default=0)
    steps = models.PositiveIntegerField(default=0)
    weight = models.FloatField(default=0)
    loss = models.FloatField(null=True, blank=True)
    norm = models.FloatField(null=True, blank=True)
    update_norm = models.FloatField(null=True, blank=True)
    cosine = models.FloatField(null=True, blank=True, help_text="To the mean of the round")
    size_bytes = models.PositiveBigIntegerField(default=0)
    bytes_up = models.PositiveBigIntegerField(default=0)
    bytes_down = models.PositiveBigIntegerField(default=0)
    requests = models.PositiveIntegerField(default=0)
    phases = models.JSONField(default=dict, help_text="Phase name -> seconds")
    started_at = models.DateTimeField(null=True, blank=True)
    uploaded_at = models.DateTimeField(null=True, blank=True)
    committed_at = models.DateTimeField(null=True, blank=True)
    weights_digest = models.CharField(max_length=64, blank=True)

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=["round", "replica"], name="one_contribution_per_replica_and_round"
            ),
        )

    def __str__(self) -> str:
        return f"{self.replica} in {self.round}"


class Checkpoint(models.Model):
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="checkpoints")
    round = models.PositiveIntegerField()
    final = models.BooleanField(default=False)
    key = models.CharField(max_length=200)
    size_bytes = models.PositiveBigIntegerField()
    digest = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    sample = models.JSONField(
        null=True, blank=True, help_text="Text generated with the final weights of a language model"
    )

    class Meta:
        ordering = ("round", "final")
        constraints = (
            models.UniqueConstraint(
                fields=["run", "round", "final"], name="one_checkpoint_per_round"
            ),
        )

    def __str__(self) -> str:
        return f"{'final' if self.final else 'checkpoint'} @ {self.round}"
