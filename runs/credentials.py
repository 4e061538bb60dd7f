"""Secrets of backends and buckets: sealed in the database, opened only where they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runs.models import Credential, Replica, Run


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What one attempt is given to open its rendezvous; ``lifetime_s`` None does not expire."""

    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    lifetime_s: float | None = None


def open_credential(credential: Credential | None) -> Mapping[str, str]:
    """Environment-variable names and values; empty for None, the server's own environment."""
    assert credential is None, "there is no store of credentials yet"
    return {}


def replica_secrets(run: Run, replica: Replica, *, lifetime_s: float | None) -> Opened:
    """What the replica's attempt needs to open the rendezvous of ``run``."""
    return Opened()
