"""The rows of a run's tables as the journal has them (:mod:`runs.ingest.journal`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Model

from runs.models import (
    Alert,
    Evaluation,
    EvaluationAttempt,
    EvaluationPlan,
    Event,
    Replica,
    ReplicaAttempt,
    ReplicaPool,
    Run,
    Webhook,
)
from runs.states import REPLICA_WORKING, RUN_LIVE, ReplicaState

Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The columns of a model that the journal contains, under the same names.

    These are all columns except keys, relations (a body names those differently) and ``omitted``.
    ``final`` columns are left out while the row is still changing at every tick.
    """

    model: type[Model]
    omitted: frozenset[str] = frozenset()
    final: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(
            field.name
            for field in self.model._meta.concrete_fields
            if not (field.primary_key or field.is_relation or field.name in self.omitted)
        )

    def body(self, row: Model, *, final: bool = True) -> Body:
        names = (name for name in self.columns if final or name not in self.final)
        return {STORED_AS.get(name, name): _value(getattr(row, name)) for name in names}


STORED_AS = {
    "open_until": "closed_until",
    "requires_intervention": "needs_person",
    "last_error": "trouble",
    "notified_at": "told_at",
}
"""Keys of the journal that differ from the column. Keys change only with its version."""

_FROM_BUCKET = {
    *("rendezvous", "group_settings", "workload", "group_fingerprint", "code_sha256", "model_hash"),
    *("committed_rounds", "tokens", "eval_loss", "eval_round", "round_s", "bytes_up", "bytes_down"),
    *("requests", "phase_s", "refused_records", "next_round", "next_command"),
}
"""Columns of a run that an import reads from other objects of its bucket."""
_LOCAL = {
    *("delete_requested_at", "delete_objects", "last_seen_at", "committed_at"),
    *("published_event_id", "end_due", "watched_round", "notify"),
}
"""Columns of a run that concern one server or database only."""
_REPORTED = {
    *("incarnation", "beat_count", "beat_at", "beat_interval_s", "beat_state", "beat_message"),
    *("beat_observed_s", "beat_judged", "step", "tokens", "loss", "tokens_per_s", "wait_fraction"),
    *("gpu_busy", "gpu_memory_bytes", "up_bytes_per_s", "down_bytes_per_s"),
    *("device", "host", "pid"),
}
"""Columns of a replica that its heartbeats and telemetry set."""

RUN = Table(
    model=Run,
    omitted=frozenset(_FROM_BUCKET | _LOCAL),
    final=("cost_usd", "train_loss", "tokens_per_s"),  # sums over reporting replicas
)
POOL = Table(model=ReplicaPool)
REPLICA = Table(
    model=Replica,
    omitted=frozenset(_REPORTED),
    final=("state", "state_reason", "state_since", "round"),  # in the heartbeat while it works
)
ATTEMPT = Table(model=ReplicaAttempt, final=("cost_usd", "billed_s"))
EVALUATION_PLAN = Table(model=EvaluationPlan, omitted=frozenset({"considered"}))
EVALUATION = Table(
    model=Evaluation,
    omitted=frozenset(  # the time of its next step, and what its result in the bucket has
        {"next_at", "metrics", "tokens", "data_digest", "harness", "device"}
    ),
)
EVALUATION_ATTEMPT = Table(model=EvaluationAttempt, omitted=frozenset({"log"}), final=("cost_usd",))
ALERT = Table(model=Alert)
EVENT = Table(model=Event)

_WORKING = REPLICA_WORKING | {ReplicaState.SUSPECT}


def run_body(run: Run) -> Body:
    credential = run.store_credential
    return {
        **RUN.body(run, final=run.state not in RUN_LIVE),
        "owner": run.owner.get_username(),
        "store_credential": credential.name if credential else None,
        "archive": run.archive_id,
        "notify": _webhook_names(run),
    }


def _webhook_names(run: Run) -> list[str] | None:
    """Webhooks by name: ids are valid in one database only."""
    if run.notify is None:
        return None
    return sorted(Webhook.objects.filter(pk__in=run.notify).values_list("name", flat=True))


def pool_body(pool: ReplicaPool, position: int) -> Body:
    credential = pool.credential.name if pool.credential else None
    added_by = pool.added_by.get_username() if pool.added_by else None
    return {
        **POOL.body(pool),
        "place": position,
        "credential": credential,
        "added_by": added_by,
    }


def replica_body(replica: Replica, positions: Mapping[int, int]) -> Body:
    body = REPLICA.body(replica, final=replica.state not in _WORKING)
    return {**body, "pool": positions[replica.pool_id]}


def attempt_body(attempt: ReplicaAttempt) -> Body:
    body = ATTEMPT.body(attempt, final=attempt.ended_at is not None)
    return {**body, "replica": attempt.replica.number}


def evaluation_plan_body(plan: EvaluationPlan) -> Body:
    return {
        **EVALUATION_PLAN.body(plan),
        "credential": plan.credential.name if plan.credential else None,
        "created_by": plan.created_by.get_username() if plan.created_by else None,
    }


def evaluation_name(evaluation: Evaluation) -> str:
    """The name of the row among those that were written."""
    return f"{evaluation.round} {evaluation.plan.name}"


def removed_evaluation_body(name: str) -> Body:
    number, _, plan = name.partition(" ")
    return {"plan": plan, "round": int(number), "removed": True}


def evaluation_body(evaluation: Evaluation) -> Body:
    return {**EVALUATION.body(evaluation), "plan": evaluation.plan.name}


def evaluation_attempt_body(attempt: EvaluationAttempt) -> Body:
    evaluation = attempt.evaluation
    body = EVALUATION_ATTEMPT.body(attempt, final=attempt.ended_at is not None)
    return {**body, "plan": evaluation.plan.name, "round": evaluation.round}


def alert_body(alert: Alert) -> Body:
    seen_by = alert.acknowledged_by
    return {
        **ALERT.body(alert),
        "replica": alert.replica.number if alert.replica else None,
        "acknowledged_by": seen_by.get_username() if seen_by else None,
    }


def event_body(event: Event) -> Body:
    return {
        **EVENT.body(event),
        "replica": event.replica.number if event.replica else None,
        "actor": event.actor.get_username() if event.actor else None,
    }


def _value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if value is None or isinstance(value, bool | int | float | list | dict):
        return value
    return str(value)
