"""What one tick of one run has seen so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from runs.metrics.changes import Changes
from runs.models import IngestState, Replica, ReplicaAttempt, Run
from runs.reconcile.decisions import BeatView, Job
from runs.states import RUN_ENDED, RunState
from runs.times import has_passed

LOST_TASK_AFTER = timedelta(seconds=5)
"""A launch that no worker has taken up for so long was lost with its message or its worker."""

WAIT_FOR_BUCKET = timedelta(minutes=10)
"""How long the end of a job or of a run waits for a bucket that cannot be read."""

PROGRESS_UNKNOWN_AFTER = timedelta(seconds=30)
"""A bucket that could not be read for so long: what a run does is unknown."""


@dataclass
class Tick:
    """``attempts`` are those that may still have a job when the tick begins. ``ingest`` is what
    ingest has stored of the bucket, None for a run whose bucket was never read."""

    run: Run
    now: datetime
    replicas: list[Replica]
    attempts: list[ReplicaAttempt]
    jobs: dict[int, Job] = field(default_factory=dict)
    beats: dict[int, BeatView] = field(default_factory=dict)
    ingest: IngestState | None = None
    started: bool = True
    """It had an attempt, so what is in its bucket is its own."""
    changes: Changes = field(default_factory=Changes)
    failed: list[str] = field(default_factory=list)
    """Steps that raised."""
    published: bool = True
    """Whether the pages were sent what this tick changed."""

    @property
    def over(self) -> bool:
        return (
            bool(self.ingest and self.ingest.final_reason)
            or self.run.state in RUN_ENDED
            or self.run.state == RunState.STOPPING
        )

    @property
    def open_by_replica(self) -> dict[int, ReplicaAttempt]:
        """Replica id -> its attempt that has not ended."""
        return {a.replica_id: a for a in self.attempts if a.ended_at is None}

    @property
    def bucket_was_read(self) -> bool:
        """Whether ingest has read all that was in the bucket when the last job ended, or control
        has waited long enough for it."""
        state = self.ingest
        if state is None or state.complete_pass >= state.wanted_pass:
            return True
        denied = state.trouble == IngestState.Trouble.DENIED
        # What was permitted before can be permitted again: a policy, a credential or a clock.
        final = state.complete_at is None or self.run.stop_requested_at is not None
        if denied and final and state.begun_pass >= state.wanted_pass:
            return True
        return self.waited_for_bucket

    @property
    def bucket_is_given_up(self) -> bool:
        """It was not read, and control waits no longer."""
        state = self.ingest
        waits = state is not None and state.complete_pass < state.wanted_pass
        return waits and self.bucket_was_read

    @property
    def waited_for_bucket(self) -> bool:
        """The bucket cannot be read, and control has waited long enough for it."""
        state, run = self.ingest, self.run
        if state is None:
            return False
        since = [state.wanted_at] if state.complete_pass < state.wanted_pass else []
        if state.trouble:
            since += [state.trouble_since, run.stop_requested_at]
        return any(at is not None and has_passed(at, WAIT_FOR_BUCKET, self.now) for at in since)

    @property
    def is_settled(self) -> bool:
        """Whether the end of the run can be decided: all that is in the bucket was read."""
        if self.ingest is None:
            return True
        every = self.ingest.every_round or self.waited_for_bucket
        return self.bucket_was_read and every

    @property
    def unknown_since(self) -> datetime | None:
        """Since when the bucket could not be read, if that is long."""
        state = self.ingest
        if state is None or not state.trouble or state.trouble_since is None:
            return None
        late = has_passed(state.trouble_since, PROGRESS_UNKNOWN_AFTER, self.now)
        return state.trouble_since if late else None


def beats_of(replicas: Iterable[Replica], ingest: IngestState | None) -> dict[int, BeatView]:
    """Replica number -> its newest beat as ingest has stored it."""
    observed_s = ingest.observed_s if ingest else 0.0
    return {
        replica.number: BeatView(
            changed=replica.beat_judged != beat_name(replica),
            state=replica.beat_state,
            message=replica.beat_message,
            interval_s=replica.beat_interval_s,
            age_s=max(observed_s - replica.beat_observed_s, 0.0),
        )
        for replica in replicas
        if replica.beat_at is not None
    }


def beat_name(replica: Replica) -> str:
    return f"{replica.incarnation}:{replica.beat_count}"
