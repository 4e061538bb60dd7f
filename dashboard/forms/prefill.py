"""Prefill the submit form from query parameters, as the planner's *Use these settings* link does.

Only known names are accepted, and as text: the form validates them like typed input. A link alone
cannot launch anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dashboard.forms.pools import initial_of
from diloco.protocol.settings import setting_fields
from runs.submit.run_draft import PoolDraft
from runs.submit.sweep_space import DERIVED

LONGEST = 200
"""Maximum length of a value."""


def from_query(initial: Mapping[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
    """``initial`` updated with the query: ``name``, ``size``, group settings, and ``replicas``,
    ``backend`` and ``hardware`` of one pool."""
    known = {spec.name for spec in setting_fields()} - DERIVED | {"name", "size"}
    values = {name: value[:LONGEST] for name, value in query.items()}
    filled = dict(initial) | {name: value for name, value in values.items() if name in known}
    if {"replicas", "backend", "hardware"} & set(values):
        pool = initial_of(PoolDraft())
        if "backend" in values and "hardware" in values:
            pool["backend"] = values["backend"]
            pool["hardware"] = f"{values['backend']}:{values['hardware']}"
        pool["count"] = replicas = values.get("replicas", pool["count"])
        filled["pools"] = [pool]
        if "max_replicas" not in values and str(replicas).isdecimal():
            filled["max_replicas"] = max(int(replicas), int(filled["max_replicas"]))
    return filled
