"""What people can do to runs: create, stop, stop or restart one replica.

A service writes what is wanted into the database and returns; workers carry it out. Nothing here
calls a backend or the bucket. Who may do what is :func:`runs.selectors.may_operate`, asked by the
caller.
"""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from runs.create import create_run
from runs.exceptions import IllegalTransition
from runs.models import Replica, Run
from runs.queue import enqueue
from runs.states import RUN_ENDED, RUN_TRANSITIONS, ReplicaState, RunState
from runs.transitions import transition, transition_replica

__all__ = [
    "create_run",
    "request_stop",
    "restart_replica",
    "stop_replica",
    "transition",
    "transition_replica",
]


def request_stop(run: Run, *, actor: User | None, reason: str = "") -> bool:
    """Ask the run to end at its newest committed round; False if it is ending or over already.

    ``actor`` None is the control plane itself, which must give its ``reason``.
    """
    reason = reason or f"stopped by {actor}"
    while run.state not in RUN_ENDED and RunState.STOPPING in RUN_TRANSITIONS[RunState(run.state)]:
        with transaction.atomic():
            if transition(run, RunState.STOPPING, reason=reason, actor=actor):
                enqueue("reconcile_run", str(run.pk))
                return True
    return False


def stop_replica(replica: Replica, *, actor: User) -> bool:
    """Cancel the replica's job; it leaves for good (until restarted). False if it is over already.

    Raises :class:`IllegalTransition` when the replica cannot be stopped in the state it is in.
    """
    if replica.ended or replica.state == ReplicaState.DRAINING:
        return False
    to = (
        ReplicaState.EVICTED
        if replica.state in (ReplicaState.PENDING, ReplicaState.RESTARTING)
        else ReplicaState.DRAINING
    )
    with transaction.atomic():
        moved = transition_replica(replica, to, reason=f"stopped by {actor}", actor=actor)
        if moved:
            enqueue("reconcile_run", str(replica.run_id))
    return moved


def restart_replica(replica: Replica, *, actor: User) -> bool:
    """End the replica's job, if it has one, and launch the same identity as a new attempt.

    Raises :class:`IllegalTransition` when the run is over or the replica cannot be restarted.
    """
    run = Run.objects.get(pk=replica.run_id)
    if run.state in RUN_ENDED or run.state == RunState.STOPPING:
        raise IllegalTransition(
            f"{replica} of a run that is {run.state}", replica.state, "restarting"
        )
    with transaction.atomic():
        moved = transition_replica(
            replica,
            ReplicaState.RESTARTING,
            reason=f"restarted by {actor}",
            actor=actor,
            relaunch_at=timezone.now(),
        )
        if moved:
            enqueue("reconcile_run", str(replica.run_id))
    return moved
