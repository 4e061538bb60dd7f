"""The state that one control tick of one run collects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property

from runs.backends import budgets
from runs.metrics.changes import Changes
from runs.models import IngestState, Replica, ReplicaAttempt, Run
from runs.reconcile.decisions import HeartbeatView, Job
from runs.states import RUN_ENDED, RunState
from runs.times import has_passed

LOST_TASK_AFTER = timedelta(seconds=5)
"""A launch that no worker has started for this long was lost with its message or its worker."""

WAIT_FOR_BUCKET = timedelta(minutes=10)
"""How long the end of a job or of a run waits for an unreadable bucket."""

PROGRESS_UNKNOWN_AFTER = timedelta(seconds=30)
"""After this long without reading the bucket, the progress of the run counts as unknown."""


@dataclass
class ReconcileContext:
    """One tick. ``attempts`` are those that can have a job when the tick begins. ``ingest`` is the
    state stored by ingest, None if the bucket was never read."""

    run: Run
    now: datetime
    replicas: list[Replica]
    attempts: list[ReplicaAttempt]
    jobs: dict[int, Job] = field(default_factory=dict)
    beats: dict[int, HeartbeatView] = field(default_factory=dict)
    ingest: IngestState | None = None
    started: bool = True
    """The run had an attempt, so its bucket holds its own objects."""
    changes: Changes = field(default_factory=Changes)
    failed: list[str] = field(default_factory=list)
    """Names of steps that raised."""
    published: bool = True
    """Whether this tick's changes were published to the pages."""

    @cached_property
    def budget_refusal(self) -> str:
        """Why a budget of the run's owner or tags refuses launches; '' if none does."""
        return budgets.refusal_of(self.run, self.now)

    @property
    def over(self) -> bool:
        """Whether the run is ending or has ended."""
        return (
            bool(self.ingest and self.ingest.final_reason)
            or self.run.state in RUN_ENDED
            or self.run.state == RunState.STOPPING
        )

    @property
    def open_by_replica(self) -> dict[int, ReplicaAttempt]:
        """The open attempt of each replica, by replica id."""
        return {a.replica_id: a for a in self.attempts if a.ended_at is None}

    @property
    def bucket_was_read(self) -> bool:
        """Whether ingest has read the bucket since the last job ended, or control stops waiting."""
        state = self.ingest
        if state is None or state.complete_pass >= state.wanted_pass:
            return True
        denied = state.trouble == IngestState.Trouble.DENIED
        # Access that worked before can return: a policy, a credential or a clock can be corrected.
        final = state.complete_at is None or self.run.stop_requested_at is not None
        if denied and final and state.begun_pass >= state.wanted_pass:
            return True
        return self.bucket_wait_is_over

    @property
    def bucket_was_given_up(self) -> bool:
        """The bucket was not read, and control has stopped waiting for it."""
        state = self.ingest
        waits = state is not None and state.complete_pass < state.wanted_pass
        return waits and self.bucket_was_read

    @property
    def bucket_wait_is_over(self) -> bool:
        """The bucket is unreadable, and control has waited :data:`WAIT_FOR_BUCKET`."""
        state, run = self.ingest, self.run
        if state is None:
            return False
        since = [state.wanted_at] if state.complete_pass < state.wanted_pass else []
        if state.trouble:
            since += [state.trouble_since, run.stop_requested_at]
        return any(at is not None and has_passed(at, WAIT_FOR_BUCKET, self.now) for at in since)

    @property
    def is_settled(self) -> bool:
        """Whether the end of the run can be decided: everything in the bucket was read."""
        if self.ingest is None:
            return True
        every = self.ingest.every_round or self.bucket_wait_is_over
        return self.bucket_was_read and every

    @property
    def unknown_since(self) -> datetime | None:
        """Since when the bucket is unreadable; None if not longer than the grace period."""
        state = self.ingest
        if state is None or not state.trouble or state.trouble_since is None:
            return None
        is_late = has_passed(state.trouble_since, PROGRESS_UNKNOWN_AFTER, self.now)
        return state.trouble_since if is_late else None


def beats_of(replicas: Iterable[Replica], ingest: IngestState | None) -> dict[int, HeartbeatView]:
    """The newest ingested heartbeat of each replica, by replica number."""
    observed_s = ingest.observed_s if ingest else 0.0
    return {
        replica.number: HeartbeatView(
            changed=replica.beat_judged != beat_id(replica),
            state=replica.beat_state,
            message=replica.beat_message,
            interval_s=replica.beat_interval_s,
            age_s=max(observed_s - replica.beat_observed_s, 0.0),
        )
        for replica in replicas
        if replica.beat_at is not None
    }


def beat_id(replica: Replica) -> str:
    return f"{replica.incarnation}:{replica.beat_count}"
