"""What the server answers with, typed. A newer server may tell more: it stays in ``raw``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

SUCCEEDED = "succeeded"
ENDED = frozenset({SUCCEEDED, "failed", "cancelled"})
"""States of a run that is over."""


@dataclass(frozen=True, kw_only=True)
class Row:
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        """Raises ``ValueError`` for an answer that is not such a row."""
        names = [f.name for f in dataclasses.fields(cls) if f.name != "raw"]
        missing = [name for name in names if name not in found]
        if missing:
            raise ValueError(
                f"expected {cls.__name__} with {', '.join(missing)}, found none: is the server "
                "older than this client?"
            )
        return cls(raw=dict(found), **{name: found[name] for name in names})


@dataclass(frozen=True, kw_only=True)
class Run(Row):
    """Times are ISO 8601 in UTC. ``live`` replicas of ``target``; below ``quorum`` it waits."""

    id: str
    name: str
    state: str
    state_reason: str
    owner: str
    committed_rounds: int
    total_rounds: int
    tokens: int
    tokens_per_s: float | None
    train_loss: float | None
    eval_loss: float | None
    live: int
    quorum: int
    target: int
    eta_s: float | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    goodput: float | None
    bytes_up: int
    bytes_down: int
    cost_usd: float
    cost_known: bool
    budget_usd: float

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def fraction(self) -> float:
        return min(self.committed_rounds / self.total_rounds, 1.0) if self.total_rounds else 0.0


@dataclass(frozen=True, kw_only=True)
class Page:
    """``next`` is ``before`` of the next page; None on the last."""

    runs: tuple[Run, ...]
    next: str | None


@dataclass(frozen=True, kw_only=True)
class Pool(Row):
    id: int
    backend: str
    hardware: str
    region: str
    spot: bool
    credential: str | None
    wanted: int
    live: int
    price_usd_h: float | None
    cost_usd: float | None


@dataclass(frozen=True, kw_only=True)
class Replica(Row):
    number: int
    state: str
    state_reason: str
    pool: int
    backend: str
    backend_state: str
    attempt: int
    round: int
    step: int
    loss: float | None
    tokens_per_s: float | None
    wait_fraction: float | None
    restarts: int
    cost_usd: float | None


@dataclass(frozen=True, kw_only=True)
class Event(Row):
    id: int
    at: str
    level: str
    kind: str
    replica: int | None
    actor: str | None
    message: str


@dataclass(frozen=True, kw_only=True)
class Alert(Row):
    """``closed_at`` None: it is so now."""

    id: int
    kind: str
    title: str
    level: str
    message: str
    opened_at: str
    closed_at: str | None
    times: int
    acknowledged_by: str | None


@dataclass(frozen=True, kw_only=True)
class LogLine(Row):
    id: int
    at: str
    replica: int
    level: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Me(Row):
    user: str
    role: str
    scopes: list[str]
    version: str


@dataclass(frozen=True, kw_only=True)
class Done(Row):
    """``changed`` is false where nothing was left to do."""

    changed: bool
    state: str


@dataclass(frozen=True, kw_only=True)
class Scaled(Row):
    change: int
    wanted: int


@dataclass(frozen=True, kw_only=True)
class DeletionPlan(Row):
    """What deleting a run with its objects would delete and keep. ``deleted`` has ``kind``,
    ``objects``, and ``size_bytes`` of each kind; ``kept_names`` are the first of the ``kept``."""

    deleted: list[Mapping[str, Any]]
    objects: int
    size_bytes: int
    kept: int
    kept_bytes: int
    kept_names: list[str]
    whole: bool
    refusal: str
