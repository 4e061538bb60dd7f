"""A run, its pools, its replicas, and the backend job of each attempt."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, Self

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.db.models.base import ModelState

from diloco.protocol.settings import GroupSettings, setting_fields
from runs.json_values import mapping
from runs.models import money
from runs.models.archive import Archive
from runs.models.credential import Credential
from runs.models.sweep import Sweep
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
        max_length=128,
        blank=True,
        help_text="From the manifest of checkpoint 0; empty until it exists",
    )
    submit_key = models.CharField(
        max_length=64,
        unique=True,
        help_text="A form that is submitted twice has one key and creates one run",
    )
    time_limit_s = models.PositiveIntegerField(default=0, help_text="0 means no limit")
    budget_usd = models.FloatField(validators=money.COST, default=0, help_text="0 means no limit")
    cost_usd = models.FloatField(
        validators=money.COST,
        default=0,
        help_text="Total of all attempts with a known price, and of the traffic",
    )
    traffic_usd = models.FloatField(
        validators=money.COST,
        default=0,
        help_text="Estimate for traffic and requests; 0 without a price for them",
    )
    start_timeout_s = models.PositiveIntegerField(
        default=0,
        help_text="The run is cancelled if training has not started by then; 0: never",
    )
    max_restarts = models.PositiveIntegerField(
        default=3, help_text="Automatic relaunches of one replica after consecutive failures"
    )
    store_credential = models.ForeignKey(
        Credential,
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="runs_stored",
        help_text="Opens the rendezvous; null: the server's own environment",
    )
    archive = models.ForeignKey(
        Archive, on_delete=models.PROTECT, null=True, blank=True, help_text="The user's code"
    )
    notify = models.JSONField(
        null=True, blank=True, help_text="IDs of the webhooks that get its alerts; null: all"
    )
    notes = models.TextField(blank=True)
    tags = models.JSONField(default=list, blank=True)
    archived_at = models.DateTimeField(null=True, blank=True, help_text="Hidden from lists since")
    forked_from = models.UUIDField(
        null=True, blank=True, help_text="The run whose checkpoint this run started from"
    )
    fork_round = models.PositiveIntegerField(default=0, help_text="Round of that checkpoint")
    fork_outer = models.BooleanField(
        default=True, help_text="Whether the fork includes the state of the outer optimizer"
    )
    sweep = models.ForeignKey(
        Sweep, on_delete=models.PROTECT, null=True, blank=True, related_name="runs"
    )
    sweep_index = models.PositiveIntegerField(default=0, help_text="Its place in its sweep")
    sweep_values = models.JSONField(default=dict, blank=True, help_text="Swept field -> value")
    sweep_held = models.BooleanField(
        default=False, help_text="Not launched until the limits of its sweep allow it"
    )
    created_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True, blank=True)
    first_step_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    stop_requested_at = models.DateTimeField(null=True, blank=True)
    cancel_at = models.DateTimeField(
        null=True, blank=True, help_text="When its jobs are ended, if it is stopped by force"
    )
    resumed_at = models.DateTimeField(
        null=True, blank=True, help_text="When it was last resumed after a pause or an end"
    )
    idle_s = models.FloatField(
        default=0, help_text="Seconds it was paused or ended; they count towards no limit"
    )
    save_requested_at = models.DateTimeField(null=True, blank=True)
    delete_requested_at = models.DateTimeField(null=True, blank=True)
    delete_objects = models.BooleanField(
        default=False, help_text="Whether the objects of its rendezvous are deleted with it"
    )
    last_seen_at = models.DateTimeField(null=True, blank=True, help_text="Newest telemetry")
    # Ingest copies these here so that lists need no join.
    committed_rounds = models.PositiveIntegerField(default=0)
    tokens = models.PositiveBigIntegerField(default=0)
    train_loss = models.FloatField(null=True, blank=True)
    eval_loss = models.FloatField(null=True, blank=True)
    tokens_per_s = models.FloatField(null=True, blank=True)
    eval_round = models.PositiveIntegerField(default=0, help_text="Round of eval_loss")
    round_s = models.FloatField(null=True, blank=True, help_text="Smoothed duration of a round")
    bytes_up = models.PositiveBigIntegerField(default=0)
    bytes_down = models.PositiveBigIntegerField(default=0)
    requests = models.PositiveBigIntegerField(default=0)
    phase_s = models.JSONField(default=dict, help_text="Phase name -> seconds, of all replicas")
    refused_records = models.PositiveIntegerField(default=0, help_text="Skipped as unreadable")
    # Progress of the control plane with this run.
    next_round = models.PositiveIntegerField(default=1, help_text="Next commit to read")
    committed_at = models.DateTimeField(
        null=True, blank=True, help_text="When ingest last read a new commit"
    )
    next_command = models.PositiveIntegerField(default=1)
    stop_sent_at = models.DateTimeField(null=True, blank=True)
    save_sent_at = models.DateTimeField(null=True, blank=True)
    published_event_id = models.PositiveBigIntegerField(default=0)
    end_due = models.BooleanField(
        default=False, help_text="It has ended, and the alert about that is not stored yet"
    )
    watched_round = models.PositiveIntegerField(
        default=0, help_text="The newest committed round that alert rules were evaluated for"
    )

    class Meta:
        ordering = ("-created_at", "-id")
        permissions = (
            ("use_local_backend", "Can run replicas on the server itself"),
            ("run_custom_code_locally", "Can run custom code on the server itself"),
        )
        indexes = (
            models.Index(fields=["-created_at", "-id"], name="run_newest"),
            models.Index(fields=["ended_at"], name="run_ended"),
            models.Index(
                fields=["state"], condition=Q(state__in=sorted(RUN_ACTIVE)), name="run_active"
            ),
            # The other orders of the list (runs.queries.listing), each in its default direction.
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

    @classmethod
    def from_db(  # type: ignore[override]  # the stubs are those of a later Django
        cls, db: str | None, field_names: Iterable[str], values: Iterable[Any]
    ) -> Self:
        """A loaded run, in a third of the time of Django's: its ``__init__`` visits every column
        and sends signals, which no code receives."""
        run = cls.__new__(cls)
        run._state = ModelState()
        run._state.adding, run._state.db = False, db
        vars(run).update(zip(field_names, values, strict=True))
        return run

    @property
    def ended(self) -> bool:
        return self.state in RUN_ENDED

    @property
    def settings(self) -> GroupSettings:
        """The group settings as stored.

        They were validated on submission and are not validated again: control must work whatever
        the column holds. A setting that is missing, because an earlier version created the run, has
        its default; an unknown one is ignored.
        """
        stored = mapping(self.group_settings)
        result = object.__new__(GroupSettings)
        # At once, because a page of the list has hundreds of runs.
        vars(result).update(
            (spec.name, stored.get(spec.name, spec.default)) for spec in setting_fields()
        )
        return result

    def setting(self, name: str) -> Any:
        """One of the :attr:`settings`, in a twentieth of the time."""
        stored = mapping(self.group_settings)
        return stored[name] if name in stored else getattr(GroupSettings, name)

    @property
    def total_rounds(self) -> int:
        total: int = self.setting("total_rounds")
        return total


class ReplicaPool(models.Model):
    """``count`` replicas on one backend and hardware, and the circuit breaker of their launches.

    The breaker opens after consecutive failures: nothing is launched in the pool before
    ``open_until``. ``requires_intervention``: the breaker stays open until an operator acts.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="pools")
    backend = models.CharField(max_length=32)
    hardware = models.CharField(max_length=64, default="cpu")
    count = models.PositiveIntegerField()
    region = models.CharField(max_length=64, blank=True)
    spot = models.BooleanField(default=False)
    image = models.CharField(max_length=300, blank=True)
    timeout_s = models.PositiveIntegerField(
        default=0, help_text="Time limit of one attempt; 0 means the backend's longest"
    )
    options = models.JSONField(default=dict, blank=True, help_text="Backend-specific options")
    credential = models.ForeignKey(
        Credential,
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="pools",
        help_text="Null: the server's own environment",
    )
    added_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
        help_text="The user whose permissions apply; null: the run's owner",
    )
    price_usd_h = models.FloatField(
        validators=money.PRICE,
        null=True,
        blank=True,
        help_text="Latest known price of one replica; null: unknown",
    )
    price_given = models.BooleanField(
        default=False, help_text="A user entered the price; it overrides the catalogue"
    )
    max_price_usd_h = models.FloatField(
        validators=money.PRICE,
        null=True,
        blank=True,
        help_text="A replica that costs more is not launched; null: no limit",
    )
    held = models.TextField(
        blank=True, help_text="Why a price or a budget prevents launches; empty: none does"
    )
    held_by = models.CharField(
        max_length=8, blank=True, help_text="price or budget; empty: it is not held"
    )
    failures = models.PositiveIntegerField(default=0, help_text="Consecutive failures")
    open_until = models.DateTimeField(null=True, blank=True)
    requires_intervention = models.BooleanField(default=False)
    last_error = models.TextField(blank=True, help_text="Latest error of the backend")

    def __str__(self) -> str:
        return f"{self.count} x {self.backend} {self.hardware}"


class Replica(models.Model):
    """One replica of a run, kept across relaunches. ``number`` is never reused within the run."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="replicas")
    pool = models.ForeignKey(ReplicaPool, on_delete=models.CASCADE, related_name="replicas")
    number = models.PositiveIntegerField()
    state = models.CharField(
        max_length=16, choices=ReplicaState.choices, default=ReplicaState.PENDING
    )
    state_reason = models.TextField(blank=True)
    state_since = models.DateTimeField()
    backend_state = models.CharField(
        max_length=64, blank=True, help_text="State of the job as the backend reports it"
    )
    pending_cause = models.CharField(
        max_length=16, blank=True, help_text="Why its job has not started yet"
    )
    pending_since = models.DateTimeField(null=True, blank=True)
    waiting_since = models.DateTimeField(
        null=True, blank=True, help_text="Since when it has waited outside a queue, for any cause"
    )
    incarnation = models.CharField(max_length=16, blank=True)
    beat_count = models.PositiveBigIntegerField(default=0)
    beat_at = models.DateTimeField(
        null=True, blank=True, help_text="When the heartbeat last changed"
    )
    beat_interval_s = models.FloatField(default=0)
    beat_state = models.CharField(
        max_length=16, blank=True, help_text="State reported by the heartbeat"
    )
    beat_message = models.TextField(blank=True)
    beat_observed_s = models.FloatField(
        default=0, help_text="observed_s of ingest when the heartbeat last changed"
    )
    beat_judged = models.CharField(
        max_length=40, blank=True, help_text="The heartbeat that control evaluated last"
    )
    round = models.PositiveIntegerField(default=0)
    step = models.PositiveBigIntegerField(default=0)
    tokens = models.PositiveBigIntegerField(default=0)
    loss = models.FloatField(null=True, blank=True)
    tokens_per_s = models.FloatField(null=True, blank=True)
    wait_fraction = models.FloatField(null=True, blank=True)
    # The newest points of the series of these names; null: not reported.
    gpu_busy = models.FloatField(null=True, blank=True, help_text="0 to 1")
    gpu_memory_bytes = models.FloatField(null=True, blank=True)
    up_bytes_per_s = models.FloatField(null=True, blank=True)
    down_bytes_per_s = models.FloatField(null=True, blank=True)
    device = models.CharField(max_length=80, blank=True)
    host = models.CharField(max_length=120, blank=True)
    pid = models.PositiveIntegerField(default=0)
    restarts = models.PositiveIntegerField(default=0)
    relaunch_at = models.DateTimeField(
        null=True, blank=True, help_text="Restarting: when the next attempt can start"
    )
    drain_sent_at = models.DateTimeField(
        null=True, blank=True, help_text="When the drain command was sent to the current attempt"
    )
    cancel_at = models.DateTimeField(
        null=True, blank=True, help_text="Draining: when its job is ended if it still runs"
    )
    worked_since = models.DateTimeField(
        null=True, blank=True, help_text="When the current attempt was first seen training"
    )
    fell_at = models.DateTimeField(
        null=True,
        blank=True,
        help_text="When its job was lost or failed; null once it trains again",
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
    """One backend job of a replica. The launch key is stored before the backend is called."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    launch_key = models.CharField(max_length=80, unique=True)
    handle = models.JSONField(null=True, blank=True)
    cause = models.CharField(max_length=16, blank=True)
    exit_code = models.IntegerField(null=True, blank=True)
    message = models.TextField(blank=True)
    created_at = models.DateTimeField()
    launched_at = models.DateTimeField(
        null=True,
        blank=True,
        help_text="When the backend had created everything that the job needs",
    )
    started_at = models.DateTimeField(
        null=True, blank=True, help_text="When the job started, as the backend reports it"
    )
    deadline_at = models.DateTimeField(
        null=True, blank=True, help_text="When the backend will end it"
    )
    expires_at = models.DateTimeField(
        null=True, blank=True, help_text="When its credentials expire"
    )
    ended_at = models.DateTimeField(null=True, blank=True)
    price_usd_h = models.FloatField(validators=money.PRICE, null=True, blank=True)
    billed_s = models.FloatField(
        validators=money.BILLED,
        null=True,
        blank=True,
        help_text="Billed seconds as the backend reports them, once it has ended",
    )
    cost_usd = models.FloatField(
        validators=money.COST, null=True, blank=True, help_text="Null: the price is unknown"
    )
    earlier_cost_usd = models.FloatField(
        validators=money.COST,
        default=0.0,
        help_text="Cost of the job before its queue suspended it",
    )

    class Meta:
        ordering = ("number",)
        indexes = (
            models.Index(
                fields=["replica"], condition=Q(ended_at__isnull=True), name="attempt_open"
            ),
            models.Index(
                fields=["ended_at"], condition=Q(ended_at__isnull=False), name="attempt_ended"
            ),
            models.Index(
                fields=["replica"],
                condition=Q(price_usd_h__isnull=True, launched_at__isnull=False),
                name="attempt_unpriced",
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
