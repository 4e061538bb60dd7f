"""What a document changes: fields that differ from those of the run that it was cloned from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.protocol.settings import setting_fields

_LABELS = {
    "time_limit_s": "Time limit",
    "start_timeout_s": "Start timeout",
    "budget_usd": "Budget",
    "max_restarts": "Restarts",
    "store_credential": "Bucket credential",
    "notify": "Webhooks for alerts",
    "trackers": "Experiment trackers",
    "evaluations": "Evaluations",
    "tags": "Tags",
}
_SKIPPED = frozenset({"name", "rendezvous", "fork"})
"""Fields that every clone has to change."""


@dataclass(frozen=True, kw_only=True)
class FieldChange:
    """``field`` is its path in the document, e.g. ``settings.inner_lr`` or ``pools.0.count``. A
    value is None where the other document has the field alone."""

    field: str
    label: str
    before: Any
    after: Any


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[FieldChange]:
    """Fields of ``after`` that differ from ``before``, in the order of the document.

    Left out are name, rendezvous and fork, and the number of replicas, which follows from the
    pools.
    """
    old, new = _flat(before), _flat(after)
    return [
        FieldChange(field=field, label=_label(field), before=old.get(field), after=new.get(field))
        for field in dict.fromkeys((*old, *new))
        if old.get(field) != new.get(field)
    ]


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        path: value
        for name, part in document.items()
        if name not in _SKIPPED
        for path, value in _paths(name, part)
        if path != "settings.num_replicas"
    }


def _paths(name: str, part: Any) -> list[tuple[str, Any]]:
    if name in ("settings", "workload") and isinstance(part, Mapping):
        return [(f"{name}.{key}", value) for key, value in part.items()]
    if name == "pools":
        return [
            (f"pools.{index}.{key}", value)
            for index, pool in enumerate(part)
            for key, value in pool.items()
        ]
    return [(name, part)]


def _label(field: str) -> str:
    head, _, name = field.partition(".")
    if head == "settings":
        return next((spec.label for spec in setting_fields() if spec.name == name), name)
    if head == "pools":
        index, _, name = name.partition(".")
        return f"Pool {int(index) + 1}: {name.replace('_', ' ')}"
    if head == "workload":
        return name.replace("_", " ").capitalize()
    return _LABELS.get(field, field)
