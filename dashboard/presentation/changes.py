"""Changes of a clone as texts, with the form's input of each field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboard.presentation.formats import exact
from runs.submit.changes import FieldChange
from runs.submit.run_draft import PlanDraft

_INPUTS = {
    "settings.start_replicas": "start",
    "workload.kind": "workload",
    "workload.archive": "archive",
    "evaluations": "s-evaluations",
}


@dataclass(frozen=True, kw_only=True)
class ChangeView:
    """``input`` is the name of the form's input; ``before`` and ``after`` are texts."""

    input: str
    label: str
    before: str
    after: str


def change_views(changes: Sequence[FieldChange], pools: Sequence[int | str]) -> list[ChangeView]:
    """``pools`` are the indices of the form's pool rows, in order."""
    return [
        ChangeView(
            input=_input(change.field, pools),
            label=change.label,
            before=_text(change.field, change.before),
            after=_text(change.field, change.after),
        )
        for change in changes
    ]


def _input(field: str, pools: Sequence[int | str]) -> str:
    if field in _INPUTS:
        return _INPUTS[field]
    head, _, name = field.partition(".")
    if head == "pools":
        index, _, name = name.partition(".")
        return f"pools.{pools[int(index)]}.{name}" if int(index) < len(pools) else ""
    return name or field


def _text(field: str, value: Any) -> str:
    if field == "notify" and value is None:
        return "all"
    if field in ("notify", "trackers", "tags") and value:
        return ", ".join(map(str, value))
    if field == "evaluations" and value:
        return "; ".join(map(_evaluation, value))
    return value_text(value)


def _evaluation(plan: Mapping[str, Any]) -> str:
    """The name of an evaluation, and what differs from the defaults."""
    plain = PlanDraft(name=plan["name"]).to_dict()
    given = [
        f"{name.removesuffix('_s').replace('_', ' ')} {value_text(value)}"
        for name, value in plan.items()
        if value not in (plain[name], "")
    ]
    return ", ".join([plan["name"], *given])


def value_text(value: Any) -> str:
    """A value of a document; it never raises, whatever a clone's run has stored."""
    if value is None or value in ("", {}, [], ()):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float):
        return str(exact(value))
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str, ensure_ascii=False)


def sets_of(changes: Sequence[FieldChange]) -> list[str]:
    """``field=value`` of each change, for the command line; the value is JSON."""
    return [
        f"{change.field}={json.dumps(change.after, default=str, ensure_ascii=False)}"
        for change in changes
    ]
