"""Contributions as plans name them."""

from __future__ import annotations

from typing import Any

from diloco.protocol.records import Identity, PlannedContribution


def planned(identity: Identity, **fields: Any) -> PlannedContribution:
    """A contribution of one step and one token of the process ``identity``."""
    chosen: dict[str, Any] = {
        "weight": 0.5,
        "tokens": 1,
        "new_tokens": 1,
        "steps": 1,
        "rounds": 1,
        "compute_s": 1.0,
        "loss": 0.0,
        "size_bytes": 1,
        "digest": "",
        **fields,
    }
    return PlannedContribution(replica=identity.replica, incarnation=identity.incarnation, **chosen)
