"""Administrator overrides for single replicas: kill, mark as lost, poll the backend.

As in :mod:`runs.actions.replicas_and_pools`, a change is written to the database and the reconciler
carries it out. Only :func:`ask_backends` calls a backend, and it changes nothing. Drain, restart,
evict and scaling are in :mod:`runs.actions.replicas_and_pools`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from executors.base import Cause, ExecutorError, JobState, ReplicaHandle, ReplicaStatus
from executors.loading import wait_loaded
from executors.registry import BACKENDS
from runs.backends.executors import executor_of
from runs.backends.parallel_calls import CallTimeout, call_all
from runs.exceptions import IllegalTransition
from runs.models import Replica, ReplicaAttempt, Run
from runs.reconcile import retry_policy
from runs.redaction import redact
from runs.states import RUN_LIVE, ReplicaState, RunState
from runs.task_queue import enqueue
from runs.transitions import transition_replica

_AT_ONCE = 40
"""Most replicas whose backends are polled by one request."""


def kill_replica(replica: Replica, *, actor: User) -> bool:
    """End the replica's job now as a failure: it relaunches by policy, and the restart counts.

    Returns False if there is no job. Raises :class:`IllegalTransition` if it would not relaunch.
    """
    run = Run.objects.get(pk=replica.run_id)
    if run.state not in RUN_LIVE | {RunState.PROVISIONING}:
        raise IllegalTransition(
            f"{replica} of a run that is {run.state}", replica.state, ReplicaState.RESTARTING
        )
    if not replica.attempts.filter(ended_at=None).exists():
        return False
    delay_s = retry_policy.relaunch_delay_s(
        ReplicaState.LOST, restarts=replica.restarts, cause="", max_restarts=run.max_restarts
    )
    if delay_s is None:
        raise IllegalTransition(
            f"{replica}, whose {run.max_restarts} restarts are used up: restart or evict it; it",
            replica.state,
            ReplicaState.RESTARTING,
        )
    now = timezone.now()
    with transaction.atomic():
        moved = transition_replica(
            replica,
            ReplicaState.RESTARTING,
            reason=f"killed by {actor}",
            actor=actor,
            restarts=replica.restarts + 1,
            relaunch_at=now + timedelta(seconds=delay_s),
            fell_at=now,
            cancel_at=now,
        )
        if moved:
            enqueue("reconcile_run", str(run.pk))
    return moved


def mark_lost(replica: Replica, *, actor: User) -> bool:
    """Record that the replica's job is gone, whatever its backend reports; False if it has none.

    The replica relaunches by policy. If the job is alive after all, the reaper ends it, and the
    newer incarnation excludes it from every round.
    """
    with transaction.atomic():
        closed = ReplicaAttempt.objects.filter(replica=replica, ended_at=None).update(
            ended_at=timezone.now(), cause=Cause.LOST, message=f"marked as lost by {actor}"
        )
        if not closed:
            return False
        if replica.state not in (ReplicaState.RESTARTING, ReplicaState.LOST):
            transition_replica(
                replica, ReplicaState.LOST, reason=f"marked as lost by {actor}", actor=actor
            )
        enqueue("reconcile_run", str(replica.run_id))
    return True


def ask_backends(replicas: Iterable[Replica]) -> dict[int, str]:
    """Poll the newest job of each replica now; return a description by replica id.

    All backends are polled in parallel, for at most
    :data:`runs.backends.parallel_calls.PATIENCE_S`.
    """
    texts: dict[int, str] = {}
    polls = {}
    replicas = list(replicas)[:_AT_ONCE]
    for replica in replicas:
        pool = replica.pool
        last = replica.attempts.order_by("-number").first()
        if last is None or last.handle is None:
            texts[replica.pk] = "has no job"
            continue
        handle, credential = ReplicaHandle(**last.handle), pool.credential

        def poll(
            backend: str = pool.backend,
            credential: object = credential,
            handle: ReplicaHandle = handle,
        ) -> ReplicaStatus:
            [status] = executor_of(backend, credential).poll([handle])  # type: ignore[arg-type]
            return status

        polls[str(replica.pk)] = poll
        texts[replica.pk] = BACKENDS.get(pool.backend, pool.backend)
    wait_loaded({replica.pool.backend for replica in replicas})
    for pk, answer in call_all(polls).items():
        texts[int(pk)] += f" {_describe(answer)}"
    return texts


def _describe(answer: ReplicaStatus | Exception) -> str:
    if isinstance(answer, ExecutorError | CallTimeout):
        return f"could not be polled: {redact(str(answer))}"
    if isinstance(answer, Exception):  # an error of a client library can contain anything
        return f"could not be polled: {type(answer).__name__}"
    parts = [f"reports {answer.state}"]
    if answer.phase and answer.phase.lower() != answer.state:
        parts.append(f"({answer.phase})")
    if answer.state == JobState.ENDED:
        parts.append(f"of {str(answer.cause or 'an unknown cause').replace('_', ' ')}")
    elif answer.started_wall_s is not None:
        began = datetime.fromtimestamp(answer.started_wall_s, tz=UTC)
        parts.append(f"since {began:%Y-%m-%d %H:%M} UTC")
    text = " ".join(parts)
    return f"{text}: {redact(answer.message)}" if answer.message else text
