"""Retry policy of the control plane as pure functions: delays, counts and limits.

Relaunches use exponential backoff as in the Kubernetes Job controller. Failures are forgiven once
an attempt has worked long enough, so that a run of weeks does not end at its fourth crash.
"""

from __future__ import annotations

import enum
from datetime import timedelta

from executors.base import Cause, PendingCause
from runs.states import ReplicaState

BACKOFF_S = 2.0
BACKOFF_CAP_S = 60.0
RELAUNCH_WITHIN = timedelta(seconds=2 * BACKOFF_CAP_S)
"""Upper bound for a stored relaunch time."""

FORGIVE_AFTER_S = 600.0
"""An attempt that worked this long resets the count of failures."""

DRAIN_FLOOR_S, DRAIN_CAP_S = 30.0, 600.0
CANCEL_WITHIN = timedelta(seconds=DRAIN_CAP_S)
"""Upper bound for a stored cancel time: see :func:`drain_s` and :func:`replace_s`."""
REPLACE_FLOOR_S = 60.0
HUNG_AFTER_S = 600.0
"""How long a replica can be silent while its backend reports it as running."""

REFUSED = "refused"
"""Cause of an attempt that the backend refused; it is not retried."""

NOT_STARTED = "not_started"
"""Cause of an attempt whose job waited longer than :func:`pending_limit_s` allows."""

PENDING_FIXED_S = {
    PendingCause.IMAGE: 300.0,
    PendingCause.INCOMPLETE: 300.0,
    PendingCause.REFUSED: 300.0,
}
"""Causes that resolve soon or never: a registry outage, a Secret that the next launch creates, a
policy that is being changed."""

EX_CONFIG = 78
"""Exit code of a replica that found a problem which a restart does not fix."""

EXCUSED_CAUSES = frozenset({Cause.PREEMPTED, Cause.DEADLINE})
"""Exit causes outside the replica's control; they do not count towards ``max_restarts``."""


def relaunch_delay_s(
    state: ReplicaState,
    *,
    restarts: int,
    cause: str,
    exit_code: int | None = None,
    max_restarts: int = 3,
) -> float | None:
    """Seconds to wait before a failed or lost replica relaunches; None for never.

    ``restarts`` counts consecutive unrequested relaunches, see :func:`restarts_after`.
    """
    if state not in (ReplicaState.FAILED, ReplicaState.LOST):
        return None
    if cause == REFUSED or exit_code == EX_CONFIG:
        return None
    if restarts >= max_restarts and cause not in EXCUSED_CAUSES:
        return None
    return float(min(BACKOFF_S * 2 ** min(restarts, 16), BACKOFF_CAP_S))


def counted_failures(restarts: int, *, worked_s: float) -> int:
    """Consecutive failures before this end; 0 after an attempt that worked long enough."""
    return 0 if worked_s >= FORGIVE_AFTER_S else restarts


def restarts_after(restarts: int, *, cause: str, worked_s: float) -> int:
    """Consecutive failures including this end."""
    before = counted_failures(restarts, worked_s=worked_s)
    return before if cause in EXCUSED_CAUSES else before + 1


def drain_s(round_s: float | None) -> float:
    """Seconds to drain a replica: two rounds, within bounds."""
    return min(max(2 * (round_s or 0.0), DRAIN_FLOOR_S), DRAIN_CAP_S)


def replace_s(round_s: float | None, lifetime_s: float) -> float:
    """Seconds before its deadline at which a replica is drained: the drain time, at most a quarter
    of its lifetime."""
    return min(max(drain_s(round_s), REPLACE_FLOOR_S), lifetime_s / 4)


def hung_s(heartbeat_timeout_s: float) -> float:
    """Seconds without a heartbeat after which a job reported as running counts as hung."""
    return max(HUNG_AFTER_S, 20 * heartbeat_timeout_s)


class NextStep(enum.StrEnum):
    """The action for an attempt that has been pending for too long."""

    RELAUNCH = "relaunch"
    """Launch it again, through the pool's circuit breaker."""
    INTERVENTION = "intervention"
    """Launch nothing in the pool until an operator acts."""


def pending_limit_s(cause: PendingCause, *, timeout_s: float) -> float | None:
    """Seconds that an attempt can be pending for ``cause``; None for no limit.

    A cluster queue (Kueue) decides how long its jobs wait. Machines, quotas and starts are waited
    for up to ``timeout_s``; 0 means no limit.
    """
    if cause is PendingCause.QUEUED:
        return None
    return PENDING_FIXED_S.get(cause, timeout_s or None)


def total_pending_limit_s(*, timeout_s: float) -> float | None:
    """Seconds that an attempt with changing causes can be pending in total, not counting time in a
    cluster queue; None for no limit."""
    return timeout_s + max(PENDING_FIXED_S.values()) if timeout_s else None


def after_pending(cause: PendingCause) -> NextStep:
    """The next step after :func:`pending_limit_s`."""

    return NextStep.INTERVENTION if cause in PENDING_FIXED_S else NextStep.RELAUNCH
