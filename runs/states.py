"""States of runs, replicas and rounds, and their allowed transitions.

:mod:`runs.transitions` makes transitions: a conditional UPDATE and an Event in one transaction. It
refuses transitions that are not in these tables.
"""

from __future__ import annotations

from django.db import models


class RunState(models.TextChoices):
    DRAFT = "draft"
    QUEUED = "queued"
    PROVISIONING = "provisioning"
    RUNNING = "running"
    DEGRADED = "degraded"
    STALLED = "stalled"
    PAUSING = "pausing"
    PAUSED = "paused"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ReplicaState(models.TextChoices):
    PENDING = "pending"
    PROVISIONING = "provisioning"
    SYNCING = "syncing"
    COMPUTING = "computing"
    UPLOADING = "uploading"
    WAITING = "waiting"
    APPLYING = "applying"
    SUSPECT = "suspect"
    LOST = "lost"
    RESTARTING = "restarting"
    DRAINING = "draining"
    EVICTED = "evicted"
    DONE = "done"
    FAILED = "failed"


class RoundState(models.TextChoices):
    COLLECTING = "collecting"
    PLANNED = "planned"
    COMMITTED = "committed"
    VOID = "void"
    TIMED_OUT = "timed_out", "timed out"


class ContributionState(models.TextChoices):
    UPLOADED = "uploaded"
    INCLUDED = "included"
    LATE = "late"
    REFUSED = "refused"


_R = RunState
RUN_ENDED = frozenset({_R.SUCCEEDED, _R.FAILED, _R.CANCELLED})
RUN_LIVE = frozenset({_R.RUNNING, _R.DEGRADED, _R.STALLED})
RUN_ACTIVE = RUN_LIVE | {_R.QUEUED, _R.PROVISIONING, _R.PAUSING, _R.STOPPING}
"""States in which the reconciler handles a run."""

_STOPPABLE = {_R.STOPPING, _R.FAILED, _R.CANCELLED}
RUN_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    _R.DRAFT: frozenset({_R.QUEUED, _R.CANCELLED}),
    _R.QUEUED: frozenset({_R.PROVISIONING} | _STOPPABLE),
    _R.PROVISIONING: frozenset(
        {_R.RUNNING, _R.DEGRADED, _R.STALLED, _R.PAUSING, _R.SUCCEEDED} | _STOPPABLE
    ),
    _R.RUNNING: frozenset({_R.DEGRADED, _R.STALLED, _R.PAUSING, _R.SUCCEEDED} | _STOPPABLE),
    _R.DEGRADED: frozenset({_R.RUNNING, _R.STALLED, _R.PAUSING, _R.SUCCEEDED} | _STOPPABLE),
    _R.STALLED: frozenset({_R.RUNNING, _R.DEGRADED, _R.PAUSING, _R.SUCCEEDED} | _STOPPABLE),
    _R.PAUSING: frozenset({_R.PAUSED, _R.SUCCEEDED} | _STOPPABLE),
    _R.PAUSED: frozenset({_R.QUEUED} | _STOPPABLE),
    _R.STOPPING: frozenset({_R.CANCELLED, _R.FAILED, _R.SUCCEEDED}),
    _R.SUCCEEDED: frozenset(),
    _R.FAILED: frozenset({_R.QUEUED}),
    _R.CANCELLED: frozenset({_R.QUEUED}),
}

_P = ReplicaState
REPLICA_ENDED = frozenset({_P.LOST, _P.EVICTED, _P.DONE, _P.FAILED})
REPLICA_WORKING = frozenset({_P.SYNCING, _P.COMPUTING, _P.UPLOADING, _P.WAITING, _P.APPLYING})
"""States that a replica reports in its heartbeat."""
REPLICA_LIVE = REPLICA_WORKING | {_P.DRAINING}

_ENDS = frozenset(REPLICA_ENDED)
_FROM_WORK = REPLICA_WORKING | {_P.SUSPECT, _P.DRAINING, _P.RESTARTING} | _ENDS
REPLICA_TRANSITIONS: dict[ReplicaState, frozenset[ReplicaState]] = {
    _P.PENDING: frozenset({_P.PROVISIONING} | _ENDS),
    _P.PROVISIONING: frozenset(_FROM_WORK),
    **{state: frozenset(_FROM_WORK - {state}) for state in REPLICA_WORKING},
    _P.SUSPECT: frozenset(_FROM_WORK - {_P.SUSPECT}),
    _P.DRAINING: frozenset({_P.RESTARTING} | _ENDS),
    _P.RESTARTING: frozenset({_P.PROVISIONING} | _ENDS),
    _P.LOST: frozenset({_P.RESTARTING} | REPLICA_WORKING),
    _P.FAILED: frozenset({_P.RESTARTING}),
    _P.EVICTED: frozenset({_P.RESTARTING}),
    _P.DONE: frozenset({_P.RESTARTING}),
}
