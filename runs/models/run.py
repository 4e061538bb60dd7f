"""A run, its pools of replicas, the replicas, and each backend job they had."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models
from django.db.models import Q

from runs.models.archive import Archive
from runs.models.credential import Credential
from runs.states import REPLICA_ENDED, RUN_ACTIVE, RUN_ENDED, ReplicaState, RunState


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
    model_hash = models.CharField(
        max_length=128, blank=True, help_text="Of checkpoint 0's manifest; until then unknown"
    )
    submit_key = models.CharField(
        max_length=64, unique=True, help_text="A form sent twice carries one key and makes one run"
    )
    time_limit_s = models.PositiveIntegerField(default=0, help_text="0 means no limit")
    budget_usd = models.FloatField(default=0, help_text="0 means no limit")
    cost_usd = models.FloatField(default=0, help_text="Of all attempts with a known price, so far")
    start_timeout_s = models.PositiveIntegerField(
        default=0,
        help_text="The run is cancelled when its first step has not been seen by then; 0: never",
    )
    max_restarts = models.PositiveIntegerField(
        default=3, help_text="Automatic relaunches of one replica, failures in a row"
    )
    store_credential = models.ForeignKey(
        Credential, on_delete=models.PROTECT, null=True, blank=True, related_name="runs_stored",
        help_text="Opens the rendezvous; none means the server's own environment",
    )  # fmt: skip
    archive = models.ForeignKey(
        Archive, on_delete=models.PROTECT, null=True, blank=True, help_text="The user's own code"
    )
    notify = models.JSONField(
        null=True, blank=True,
        help_text="Ids of the webhooks that are told of its alerts; null: all there are",
    )  # fmt: skip
    notes = models.TextField(blank=True)
    tags = models.JSONField(default=list, blank=True)
    archived_at = models.DateTimeField(null=True, blank=True, help_text="Left out of lists since")
    forked_from = models.UUIDField(
        null=True, blank=True, help_text="The run whose checkpoint this one began with"
    )
    fork_round = models.PositiveIntegerField(default=0, help_text="Of that checkpoint")
    fork_outer = models.BooleanField(
        default=True, help_text="Whether the outer optimizer was taken over with the weights"
    )
    created_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True, blank=True)
    first_step_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    stop_requested_at = models.DateTimeField(null=True, blank=True)
    cancel_at = models.DateTimeField(
        null=True, blank=True, help_text="Stopped by force: when its jobs are ended"
    )
    resumed_at = models.DateTimeField(
        null=True, blank=True, help_text="When it was last sent on after a pause or an end"
    )
    idle_s = models.FloatField(
        default=0, help_text="Seconds it was paused, or over; they count towards no limit"
    )
    save_requested_at = models.DateTimeField(null=True, blank=True)
    delete_requested_at = models.DateTimeField(null=True, blank=True)
    delete_objects = models.BooleanField(
        default=False, help_text="Whether what lies in the rendezvous is deleted with it"
    )
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
    save_sent_at = models.DateTimeField(null=True, blank=True)
    published_event_id = models.PositiveBigIntegerField(default=0)
    end_due = models.BooleanField(
        default=False, help_text="It has ended, and the alert of that is not made yet"
    )
    watched_round = models.PositiveIntegerField(
        default=0, help_text="The newest committed round that alerts were judged by"
    )

    class Meta:
        ordering = ("-created_at", "-id")
        permissions = (
            ("use_local_backend", "Can run replicas on the server itself"),
            ("run_custom_code_locally", "Can run custom code on the server itself"),
        )
        indexes = (
            models.Index(fields=["-created_at", "-id"], name="run_newest"),
            models.Index(
                fields=["state"], condition=Q(state__in=sorted(RUN_ACTIVE)), name="run_active"
            ),
            # The list's other orders (runs.queries.listing), each in the direction of a first
            # press.
            *(
                models.Index(
                    fields=[column, "-id"],
                    condition=Q(archived_at__isnull=True),
                    name=f"run_by_{column.strip('-')}",
                )
                for column in (
                    "name",
                    "eval_loss",
                    "train_loss",
                    "-tokens",
                    "-cost_usd",
                    "-committed_rounds",
                    "-started_at",
                )
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
    """``count`` replicas of one backend and hardware, and how that backend has been doing.

    The breaker: after failures in a row nothing is launched in the pool before ``closed_until``;
    ``needs_person`` says that only somebody who acts can help.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="pools")
    backend = models.CharField(max_length=32)
    hardware = models.CharField(max_length=64, default="cpu")
    count = models.PositiveIntegerField()
    region = models.CharField(max_length=64, blank=True)
    spot = models.BooleanField(default=False)
    image = models.CharField(max_length=300, blank=True)
    timeout_s = models.PositiveIntegerField(
        default=0, help_text="Deadline of one attempt; 0 means the longest the backend allows"
    )
    options = models.JSONField(default=dict, blank=True, help_text="The backend's own")
    credential = models.ForeignKey(
        Credential, on_delete=models.PROTECT, null=True, blank=True, related_name="pools",
        help_text="None means the server's own environment",
    )  # fmt: skip
    added_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, blank=True,
        related_name="+", help_text="With whose permissions it runs; null: the run's owner",
    )  # fmt: skip
    price_usd_h = models.FloatField(
        null=True, blank=True, help_text="Of one replica, as known last; null: not known"
    )
    price_given = models.BooleanField(
        default=False, help_text="Somebody typed the price: the catalogue's does not matter"
    )
    max_price_usd_h = models.FloatField(
        null=True, blank=True, help_text="What it may cost at most, or it is not taken; null: any"
    )
    held = models.TextField(
        blank=True, help_text="Why its price keeps it from being launched; '': it does not"
    )
    failures = models.PositiveIntegerField(default=0, help_text="In a row")
    closed_until = models.DateTimeField(null=True, blank=True)
    needs_person = models.BooleanField(default=False)
    trouble = models.TextField(blank=True, help_text="The backend's newest refusal")

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
        max_length=64, blank=True, help_text="What the backend says, not what we conclude"
    )
    pending_cause = models.CharField(
        max_length=16, blank=True, help_text="Why its job has not started yet"
    )
    pending_since = models.DateTimeField(null=True, blank=True)
    waiting_since = models.DateTimeField(
        null=True, blank=True, help_text="Since when it has waited outside of a queue, any cause"
    )
    incarnation = models.CharField(max_length=16, blank=True)
    beat_count = models.PositiveBigIntegerField(default=0)
    beat_at = models.DateTimeField(null=True, blank=True, help_text="When we saw the beat change")
    beat_interval_s = models.FloatField(default=0)
    beat_state = models.CharField(max_length=16, blank=True, help_text="As the beat reports it")
    beat_message = models.TextField(blank=True)
    beat_observed_s = models.FloatField(
        default=0, help_text="Ingest's observed_s when the beat changed: its age is the difference"
    )
    beat_judged = models.CharField(
        max_length=40, blank=True, help_text="The beat by which control has judged last"
    )
    round = models.PositiveIntegerField(default=0)
    step = models.PositiveBigIntegerField(default=0)
    tokens = models.PositiveBigIntegerField(default=0)
    loss = models.FloatField(null=True, blank=True)
    tokens_per_s = models.FloatField(null=True, blank=True)
    wait_fraction = models.FloatField(null=True, blank=True)
    # The newest points of the series of these names; null: not told.
    gpu_busy = models.FloatField(null=True, blank=True, help_text="0 to 1")
    gpu_memory_bytes = models.FloatField(null=True, blank=True)
    up_bytes_per_s = models.FloatField(null=True, blank=True)
    down_bytes_per_s = models.FloatField(null=True, blank=True)
    device = models.CharField(max_length=80, blank=True)
    host = models.CharField(max_length=120, blank=True)
    pid = models.PositiveIntegerField(default=0)
    restarts = models.PositiveIntegerField(default=0)
    relaunch_at = models.DateTimeField(
        null=True, blank=True, help_text="Restarting: when the next attempt may start"
    )
    drain_sent_at = models.DateTimeField(
        null=True, blank=True, help_text="When the current attempt was told to finish and leave"
    )
    cancel_at = models.DateTimeField(
        null=True, blank=True, help_text="Leaving: when its job is ended if it has not by itself"
    )
    worked_since = models.DateTimeField(
        null=True, blank=True, help_text="When the current attempt was first seen at work"
    )
    fell_at = models.DateTimeField(
        null=True, blank=True,
        help_text="When a job of it was lost or failed; null once it works again",
    )  # fmt: skip

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
    launched_at = models.DateTimeField(
        null=True, blank=True, help_text="When everything that its job needs had been created"
    )
    started_at = models.DateTimeField(
        null=True, blank=True, help_text="When the backend says that it began to run"
    )
    deadline_at = models.DateTimeField(
        null=True, blank=True, help_text="When the backend will end it"
    )
    expires_at = models.DateTimeField(
        null=True, blank=True, help_text="When the credentials it was given end"
    )
    ended_at = models.DateTimeField(null=True, blank=True)
    price_usd_h = models.FloatField(null=True, blank=True)
    billed_s = models.FloatField(
        null=True, blank=True, help_text="Seconds the backend says that it bills, once it has ended"
    )
    cost_usd = models.FloatField(null=True, blank=True, help_text="Null: the price is not known")
    earlier_cost_usd = models.FloatField(
        default=0.0, help_text="Of the times it ran before its queue suspended it"
    )

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

    @property
    def is_complete(self) -> bool:
        """Whether its backend has created everything that the job needs."""
        return self.handle is not None and self.launched_at is not None
