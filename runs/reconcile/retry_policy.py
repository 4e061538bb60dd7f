"""How long, how often, how much: what the control plane allows, as pure functions.

Sources: relaunch with exponential backoff as in Kubernetes' Job controller; a failure is forgiven
when the attempt before it had worked for long enough, so that a run of weeks is not ended by its
fourth preemption.
"""

from __future__ import annotations

import enum
from datetime import timedelta

from executors.base import Cause, PendingCause
from runs.states import ReplicaState

BACKOFF_S = 2.0
BACKOFF_CAP_S = 60.0
RELAUNCH_WITHIN = timedelta(seconds=2 * BACKOFF_CAP_S)
"""No relaunch is stored further ahead."""

FORGIVE_AFTER_S = 600.0
"""An attempt that worked for so long starts the count of failures anew."""

DRAIN_FLOOR_S, DRAIN_CAP_S = 30.0, 600.0
CANCEL_WITHIN = timedelta(seconds=DRAIN_CAP_S)
"""No end of a job is stored further ahead: see :func:`drain_s` and :func:`hand_over_s`."""
HAND_OVER_FLOOR_S = 60.0
HUNG_AFTER_S = 600.0
"""How long a replica may be silent while its backend says that it runs."""

REFUSED = "refused"
"""Cause of an attempt that the backend would not take; not tried again."""

NOT_STARTED = "not_started"
"""Cause of an attempt whose job waited longer than :func:`pending_limit_s` allows."""

PENDING_FIXED_S = {
    PendingCause.IMAGE: 300.0,
    PendingCause.INCOMPLETE: 300.0,
    PendingCause.REFUSED: 300.0,
}
"""Causes that pass by themselves only if they pass soon: a registry that is down, a Secret that the
next launch creates, a policy that is being changed."""

WILL_NOT_MEND = 78
"""Exit code (EX_CONFIG) of a replica that found something wrong which a restart does not change."""

INNOCENT = frozenset({Cause.PREEMPTED, Cause.DEADLINE})
"""Ends that say nothing about the replica: they do not count against it."""


def relaunch_delay_s(
    state: ReplicaState,
    *,
    restarts: int,
    cause: str,
    exit_code: int | None = None,
    max_restarts: int = 3,
) -> float | None:
    """Seconds to wait before a failed or lost replica is launched again, None for never.

    ``restarts``: relaunches in a row that nobody asked for, see :func:`restarts_after`.
    """
    if state not in (ReplicaState.FAILED, ReplicaState.LOST):
        return None
    if cause == REFUSED or exit_code == WILL_NOT_MEND:
        return None
    if restarts >= max_restarts and cause not in INNOCENT:
        return None
    return float(min(BACKOFF_S * 2 ** min(restarts, 16), BACKOFF_CAP_S))


def held_against(restarts: int, *, worked_s: float) -> int:
    """The failures in a row before this end: none are left once an attempt has worked long."""
    return 0 if worked_s >= FORGIVE_AFTER_S else restarts


def restarts_after(restarts: int, *, cause: str, worked_s: float) -> int:
    """The count of failures in a row, this end included."""
    before = held_against(restarts, worked_s=worked_s)
    return before if cause in INNOCENT else before + 1


def drain_s(round_s: float | None) -> float:
    """How long a replica gets to give its work to a round and leave: two rounds, within bounds."""
    return min(max(2 * (round_s or 0.0), DRAIN_FLOOR_S), DRAIN_CAP_S)


def hand_over_s(round_s: float | None, lifetime_s: float) -> float:
    """How long before its deadline a replica is asked to leave: a drain, at most a quarter of its
    life."""
    return min(max(drain_s(round_s), HAND_OVER_FLOOR_S), lifetime_s / 4)


def hung_s(heartbeat_timeout_s: float) -> float:
    """After so long without a beat a job that its backend calls running is taken for hung."""
    return max(HUNG_AFTER_S, 20 * heartbeat_timeout_s)


class NextStep(enum.StrEnum):
    """What follows when an attempt has been pending for too long."""

    RELAUNCH = "relaunch"
    """Launch it again, after the pool's circuit breaker."""
    INTERVENTION = "intervention"
    """Launch nothing in the pool until an operator has acted."""


def pending_limit_s(cause: PendingCause, *, timeout_s: float) -> float | None:
    """How long an attempt can be pending for ``cause``, None without a limit.

    A queue of the cluster (Kueue) decides itself how long its jobs wait. Machines, quotas and
    starts are waited for as long as ``timeout_s``, 0 for ever.
    """
    if cause is PendingCause.QUEUED:
        return None
    return PENDING_FIXED_S.get(cause, timeout_s or None)


def total_pending_limit_s(*, timeout_s: float) -> float | None:
    """How long an attempt can be pending in all, its time in a queue of the cluster left out, when
    its cause changes again and again; None without a limit."""
    return timeout_s + max(PENDING_FIXED_S.values()) if timeout_s else None


def after_pending(cause: PendingCause) -> NextStep:
    """The next step once :func:`pending_limit_s` is over."""
    return NextStep.INTERVENTION if cause in PENDING_FIXED_S else NextStep.RELAUNCH
