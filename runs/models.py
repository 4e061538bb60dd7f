"""Tables of the control plane. They cache the bucket: only users and credentials live here alone.

Models hold fields, constraints and cheap properties. Transitions are in :mod:`runs.services`,
queries in :mod:`runs.selectors`.
"""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models
from django.db.models import Q

from runs.states import (
    REPLICA_ENDED,
    RUN_ACTIVE,
    RUN_ENDED,
    ContributionState,
    ReplicaState,
    RoundState,
    RunState,
)


class Run(models.Model):
    """One training run: one ``group.json``, one rendezvous."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=80)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="runs"
    )
    state = models.CharField(max_length=16, choices=RunState.choices, default=RunState.DRAFT)
    state_reason = models.TextField(blank=True)
    state_since = models.DateTimeField()
    rendezvous = models.CharField(max_length=500, help_text="URI of the run's own prefix")
    group_settings = models.JSONField(help_text="Editable until launch; read-only after")
    workload = models.JSONField()
    group_fingerprint = models.CharField(max_length=64, blank=True)
    code_sha256 = models.CharField(max_length=64, blank=True)
    submit_key = models.CharField(
        max_length=64, unique=True, help_text="A form sent twice carries one key and makes one run"
    )
    time_limit_s = models.PositiveIntegerField(default=0, help_text="0 means no limit")
    created_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True, blank=True)
    first_step_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    stop_requested_at = models.DateTimeField(null=True, blank=True)
    last_seen_at = models.DateTimeField(null=True, blank=True, help_text="Newest telemetry")
    # What lists show without a join, kept by ingest.
    committed_rounds = models.PositiveIntegerField(default=0)
    tokens = models.PositiveBigIntegerField(default=0)
    train_loss = models.FloatField(null=True, blank=True)
    eval_loss = models.FloatField(null=True, blank=True)
    tokens_per_s = models.FloatField(null=True, blank=True)
    eval_round = models.PositiveIntegerField(default=0, help_text="Round of eval_loss")
    round_s = models.FloatField(null=True, blank=True, help_text="Smoothed duration of a round")
    bytes_up = models.PositiveBigIntegerField(default=0)
    bytes_down = models.PositiveBigIntegerField(default=0)
    phase_s = models.JSONField(default=dict, help_text="Phase name -> seconds, all replicas")
    refused_records = models.PositiveIntegerField(default=0, help_text="Unreadable, skipped")
    # How far the control plane has come with this run.
    next_round = models.PositiveIntegerField(default=1, help_text="Next commit to read")
    committed_at = models.DateTimeField(null=True, blank=True, help_text="When we saw a commit")
    next_command = models.PositiveIntegerField(default=1)
    stop_sent_at = models.DateTimeField(null=True, blank=True)
    published_event_id = models.PositiveBigIntegerField(default=0)

    class Meta:
        ordering = ("-created_at", "-id")
        indexes = (
            models.Index(fields=["-created_at", "-id"], name="run_newest"),
            models.Index(
                fields=["state"], condition=Q(state__in=sorted(RUN_ACTIVE)), name="run_active"
            ),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(state__in=RunState.values), name="run_state_is_known"
            ),
        )

    def __str__(self) -> str:
        return self.name

    @property
    def ended(self) -> bool:
        return self.state in RUN_ENDED

    @property
    def total_rounds(self) -> int:
        return int(self.group_settings["total_rounds"])


class ReplicaPool(models.Model):
    """``count`` replicas of one backend and hardware."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="pools")
    backend = models.CharField(max_length=32)
    hardware = models.CharField(max_length=64, default="cpu")
    count = models.PositiveIntegerField()

    def __str__(self) -> str:
        return f"{self.count} x {self.backend} {self.hardware}"


class Replica(models.Model):
    """An identity in the run, kept across relaunches; ``number`` is unique in the run for ever."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="replicas")
    pool = models.ForeignKey(ReplicaPool, on_delete=models.CASCADE, related_name="replicas")
    number = models.PositiveIntegerField()
    state = models.CharField(
        max_length=16, choices=ReplicaState.choices, default=ReplicaState.PENDING
    )
    state_reason = models.TextField(blank=True)
    state_since = models.DateTimeField()
    backend_state = models.CharField(
        max_length=32, blank=True, help_text="What the backend says, not what we conclude"
    )
    incarnation = models.CharField(max_length=16, blank=True)
    beat_count = models.PositiveBigIntegerField(default=0)
    beat_at = models.DateTimeField(null=True, blank=True, help_text="When we saw the beat change")
    beat_interval_s = models.FloatField(default=0)
    round = models.PositiveIntegerField(default=0)
    step = models.PositiveBigIntegerField(default=0)
    tokens = models.PositiveBigIntegerField(default=0)
    loss = models.FloatField(null=True, blank=True)
    tokens_per_s = models.FloatField(null=True, blank=True)
    wait_fraction = models.FloatField(null=True, blank=True)
    device = models.CharField(max_length=80, blank=True)
    host = models.CharField(max_length=120, blank=True)
    pid = models.PositiveIntegerField(default=0)
    restarts = models.PositiveIntegerField(default=0)
    relaunch_at = models.DateTimeField(
        null=True, blank=True, help_text="Restarting: when the next attempt may start"
    )

    class Meta:
        ordering = ("number",)
        constraints = (
            models.UniqueConstraint(fields=["run", "number"], name="replica_number_is_unique"),
            models.CheckConstraint(
                condition=Q(state__in=ReplicaState.values), name="replica_state_is_known"
            ),
        )

    def __str__(self) -> str:
        return f"replica {self.number}"

    @property
    def ended(self) -> bool:
        return self.state in REPLICA_ENDED


class ReplicaAttempt(models.Model):
    """One backend job of a replica. The launch key is written before the backend is called."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    launch_key = models.CharField(max_length=80, unique=True)
    handle = models.JSONField(null=True, blank=True)
    cause = models.CharField(max_length=16, blank=True)
    exit_code = models.IntegerField(null=True, blank=True)
    message = models.TextField(blank=True)
    created_at = models.DateTimeField()
    launched_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("number",)
        indexes = (
            models.Index(
                fields=["replica"], condition=Q(ended_at__isnull=True), name="attempt_open"
            ),
        )
        constraints = (
            models.UniqueConstraint(fields=["replica", "number"], name="attempt_number_is_unique"),
        )

    def __str__(self) -> str:
        return self.launch_key


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

    class Meta:
        ordering = ("number",)
        constraints = (
            models.UniqueConstraint(fields=["run", "number"], name="round_number_is_unique"),
        )

    def __str__(self) -> str:
        return f"round {self.number}"


class Contribution(models.Model):
    """What one replica gave to one round, and how long each phase took it (seconds)."""

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


class TelemetryCursor(models.Model):
    """The next segment to read of one incarnation; moves in the transaction that stores it."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="cursors")
    incarnation = models.CharField(max_length=16)
    next_n = models.PositiveIntegerField(default=1)
    ended = models.BooleanField(default=False)
    moved_at = models.DateTimeField(help_text="When it last moved")
    refused = models.PositiveIntegerField(default=0, help_text="Segments that were unreadable")
    nonfinite = models.BooleanField(default=False, help_text="A loss was NaN or infinite")

    class Meta:
        indexes = (models.Index(fields=["replica"], condition=Q(ended=False), name="cursor_open"),)
        constraints = (
            models.UniqueConstraint(
                fields=["replica", "incarnation"], name="one_cursor_per_incarnation"
            ),
        )

    def __str__(self) -> str:
        return f"{self.replica} {self.incarnation} @ {self.next_n}"


class MetricBlock(models.Model):
    """Many points of one series in one row.

    ``replica`` is null for series of the whole run (``eval_loss``). ``level`` 0 holds the points as
    they came; level k will hold one bucket (last, min, max) per 2**k points, which is why points
    are grouped by ``index`` = first x // :data:`runs.blocks.BLOCK_STEPS` and stay put as data is
    appended. ``data`` is packed by :mod:`runs.blocks`.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="metric_blocks")
    replica = models.ForeignKey(
        Replica, on_delete=models.CASCADE, related_name="metric_blocks", null=True
    )
    series = models.CharField(max_length=32)
    level = models.PositiveSmallIntegerField(default=0)
    index = models.PositiveIntegerField()
    count = models.PositiveIntegerField(default=0)
    data = models.BinaryField()

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=["run", "replica", "series", "level", "index"],
                name="metric_block_of_replica_is_unique",
            ),
            models.UniqueConstraint(
                fields=["run", "series", "level", "index"],
                condition=Q(replica__isnull=True),
                name="metric_block_of_run_is_unique",
            ),
        )

    def __str__(self) -> str:
        return f"{self.series} block {self.index}"


class LogLine(models.Model):
    """A line a replica wrote through its telemetry."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="log_lines")
    incarnation = models.CharField(max_length=16)
    at = models.DateTimeField()
    level = models.CharField(max_length=8)
    message = models.TextField()

    class Meta:
        ordering = ("id",)

    def __str__(self) -> str:
        return self.message


class Checkpoint(models.Model):
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="checkpoints")
    round = models.PositiveIntegerField()
    final = models.BooleanField(default=False)
    key = models.CharField(max_length=200)
    size_bytes = models.PositiveBigIntegerField()
    digest = models.CharField(max_length=64)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ("round", "final")
        constraints = (
            models.UniqueConstraint(
                fields=["run", "round", "final"], name="one_checkpoint_per_round"
            ),
        )

    def __str__(self) -> str:
        return f"{'final' if self.final else 'checkpoint'} @ {self.round}"


class Event(models.Model):
    """Who, when, from, to, why. Written in the transaction that changes the state; never edited."""

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
