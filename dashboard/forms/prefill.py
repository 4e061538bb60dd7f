"""The submit form filled in from an address, as the planner's *Use these settings* writes it.

Only names the form knows are taken, and as text: the form checks them as if somebody had typed
them. Nothing of an address can launch anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dashboard.forms.pools import initial_of
from dashboard.forms.run import DERIVED
from diloco.protocol.settings import setting_fields
from runs.submit.run_draft import PoolDraft

LONGEST = 200
"""Characters of a value."""


def from_query(initial: Mapping[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
    """``initial`` with what the query names over it: ``name``, ``size``, group settings, and
    ``replicas``, ``backend`` and ``hardware`` of one pool."""
    known = {spec.name for spec in setting_fields()} - DERIVED | {"name", "size"}
    given = {name: value[:LONGEST] for name, value in query.items()}
    filled = dict(initial) | {name: value for name, value in given.items() if name in known}
    if {"replicas", "backend", "hardware"} & set(given):
        pool = initial_of(PoolDraft())
        if "backend" in given and "hardware" in given:
            pool["backend"] = given["backend"]
            pool["hardware"] = f"{given['backend']}:{given['hardware']}"
        pool["count"] = replicas = given.get("replicas", pool["count"])
        filled["pools"] = [pool]
        if "max_replicas" not in given and str(replicas).isdecimal():
            filled["max_replicas"] = max(int(replicas), int(filled["max_replicas"]))
    return filled
