"""All rows of a run as values that can be compared between databases, also across processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django.apps import apps
from django.db import models

from runs.restore import import_run

NOT_IMPORTED = {
    "Run": {"published_event_id"},  # a row id
    "EvaluationPlan": {"considered"},  # all checkpoints are considered again
    "EvaluationAttempt": {"log"},  # the journal has no output of jobs
}
"""Columns that an import does not restore."""
NAMES: dict[str, Callable[[Any], Any]] = {
    "run": lambda run: run.pk,
    "owner": lambda user: user.username,
    "acknowledged_by": lambda user: user.username,
    "actor": lambda user: user.username,
    "store_credential": lambda credential: credential.name,
    "credential": lambda credential: credential.name,
    "archive": lambda archive: archive.pk,
    "replica": lambda replica: replica.number,
    "round": lambda row: row.number,
    "plan": lambda plan: plan.name,
    "evaluation": lambda evaluation: [evaluation.plan.name, evaluation.round],
    "created_by": lambda user: user.username,
    "pool": lambda pool: [p.pk for p in pool.run.pools.order_by("pk")].index(pool.pk),
}
"""References to other rows, by a value that a restored row has too."""
ROWS = {
    "Run": "pk",
    "ReplicaPool": "run",
    "Replica": "run",
    "ReplicaAttempt": "replica__run",
    "Round": "run",
    "Contribution": "round__run",
    "Checkpoint": "run",
    "Event": "run",
    "MetricBlock": "run",
    "LogLine": "replica__run",
    "EvaluationPlan": "run",
    "Evaluation": "run",
    "EvaluationAttempt": "evaluation__run",
    "Alert": "run",
    "TelemetryCursor": "replica__run",
}


def rows(run: Any, *, but: dict[str, set[str]] | None = None) -> dict[str, list[Any]]:
    """All rows of the run, without ids and the clock columns of the control plane."""
    result: dict[str, list[Any]] = {}
    for name, path in ROWS.items():
        model = apps.get_model("runs", name)
        left_out = {"id"} if name != "Run" else set()
        left_out |= NOT_IMPORTED.get(name, set()) | import_run.OWN_CLOCK.get(name, frozenset())
        left_out |= (but or {}).get(name, set())
        fields = [f for f in model._meta.concrete_fields if f.name not in left_out]
        values = [
            {f.name: _comparable(getattr(row, f.name), f) for f in fields}
            for row in model.objects.filter(**{path: run.pk})
        ]
        if name != "Event":  # their order is part of them
            values.sort(key=lambda row: json.dumps(row, sort_keys=True, default=str))
        result[name] = values
    return result


def _comparable(value: Any, field: models.Field[Any, Any]) -> Any:
    if isinstance(field, models.ForeignKey):
        return None if value is None else NAMES[field.name](value)
    return bytes(value).hex() if isinstance(field, models.BinaryField) else value
