"""The services that the parts of one replica's round loop share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from diloco.clock import Clock
from diloco.exchange.team import Team
from diloco.membership.lease import Lease
from diloco.protocol.records import Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store
from diloco.store.metered import MeteredStore
from diloco.telemetry.writer import TelemetryWriter
from diloco.training.checkpoint import VectorStorage
from diloco.training.replica_state import ReplicaState, StateReader, StateWriter


class ReplicaStorage(VectorStorage, StateReader, Protocol):
    """The ranks of a replica, which write and read its checkpoints and its state together."""

    def state_writer(self, state: ReplicaState) -> StateWriter:
        """Return the writer of the replica state, whose residuals are slices."""
        ...


@dataclass(frozen=True, kw_only=True)
class ReplicaContext:
    """Store, settings, lease, telemetry and clock of a replica.

    ``store`` retries requests; ``metered`` below it counts their bytes. ``check`` is called during
    every wait; it raises :class:`~diloco.errors.StopTraining` or
    :class:`~diloco.errors.FencedOut` when the replica has to stop. ``team`` and ``storage`` are
    None in a replica of one process.
    """

    store: Store
    metered: MeteredStore
    settings: GroupSettings
    lease: Lease
    telemetry: TelemetryWriter
    clock: Clock
    check: Callable[[], None]
    team: Team | None = None
    storage: ReplicaStorage | None = None

    @property
    def identity(self) -> Identity:
        return self.lease.identity

    def committer(self) -> int | None:
        """Return the only replica that can create objects, or None if the store has an atomic
        create and all replicas can."""
        return None if self.store.atomic_create else self.lease.committer

    def can_create(self) -> bool:
        """Return whether this replica can create objects."""
        return self.committer() in (None, self.identity.replica)
