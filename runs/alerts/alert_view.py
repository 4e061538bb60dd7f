"""The state of a run that alert rules are evaluated on: plain data, without I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from runs.states import ReplicaState, RunState


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """One replica of the run."""

    number: int
    state: ReplicaState
    reason: str = ""
    fell: bool = False
    """Its job was lost or failed, and it waits for its relaunch."""
    nonfinite: bool = False
    """Its current process has reported a loss that is NaN or infinite."""
    left_s: float | None = None
    """Seconds until the backend ends its job; None without a deadline or a job."""
    granted_s: float | None = None
    """Total time limit of its job, in seconds."""


@dataclass(frozen=True, kw_only=True)
class PoolView:
    """A pool whose backend account needs an operator."""

    id: int
    name: str
    last_error: str = ""


@dataclass(frozen=True, kw_only=True)
class RoundsView:
    """The newest committed rounds, oldest first."""

    losses: tuple[tuple[int, float], ...] = ()
    """(round, loss) of up to SPIKE_WINDOW + 1 rounds."""
    late: tuple[frozenset[int], ...] = ()
    """For each of the RECENT rounds, the numbers of the late replicas."""
    stale: dict[int, int] = field(default_factory=dict)
    """Replica -> age in rounds of the weights that its newest contribution is based on."""
    mismatch: tuple[int, ...] = ()
    """Those of the RECENT rounds after which the weights of replicas differ."""
    goodput: float | None = None
    """Share of compute in the time of the RECENT rounds; None before there are enough rounds."""


@dataclass(frozen=True, kw_only=True)
class IngestView:
    """Progress of ingest."""

    unread_since: datetime | None = None
    """Since when the rendezvous cannot be read, if that is too long."""
    unread_because: str = ""
    quarantined: int = 0
    lag_s: float = 0.0
    """Seconds since ingest was last up to date."""


@dataclass(frozen=True, kw_only=True)
class AlertView:
    """A run at the end of one tick."""

    state: RunState
    reason: str = ""
    quorum: int = 1
    target: int = 1
    training: bool = False
    replicas: tuple[ReplicaView, ...] = ()
    pools: tuple[PoolView, ...] = ()
    ingest: IngestView = IngestView()
    losses_read: bool = True
    """Whether ``nonfinite`` of the replicas is known."""
    rounds: RoundsView | None = None
    """None if no round was committed since the last evaluation."""
    low_goodput: bool = False
    """Whether the alert about goodput is open."""
    cost_usd: float = 0.0
    budget_usd: float = 0.0
    age_s: float = 0.0
    time_limit_s: int = 0
    committed: int = 0
    total: int = 0
