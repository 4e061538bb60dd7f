"""What one tick of one run has seen so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from diloco.rendezvous.records import FinalManifest
from runs.bucket.reading import Changes
from runs.control.decide import BeatView, Job
from runs.models import Replica, ReplicaAttempt, Run
from runs.states import RUN_ENDED, RunState

LOST_TASK_AFTER = timedelta(seconds=5)
"""A launch that nobody has worked on for so long was lost with its message or its worker."""


@dataclass
class Tick:
    """``attempts`` are those that may still have a job when the tick begins."""

    run: Run
    now: datetime
    replicas: list[Replica]
    attempts: list[ReplicaAttempt]
    jobs: dict[int, Job] = field(default_factory=dict)
    beats: dict[int, BeatView] = field(default_factory=dict)
    final: FinalManifest | None = None
    bucket_was_read: bool = True
    every_round_was_read: bool = True
    changes: Changes = field(default_factory=Changes)

    @property
    def over(self) -> bool:
        return (
            self.final is not None
            or self.run.state in RUN_ENDED
            or self.run.state == RunState.STOPPING
        )

    @property
    def open_by_replica(self) -> dict[int, ReplicaAttempt]:
        """Replica id -> its attempt that has not ended."""
        return {a.replica_id: a for a in self.attempts if a.ended_at is None}
