"""What an administrator does to single replicas where the control plane cannot know better: kill,
mark as lost, ask the backend.

As in :mod:`runs.actions.replicas_and_pools` what changes is written and the reconciler carries it
out; only :func:`ask_backends` calls a backend, and it changes nothing. Drain, restart, evict and
scaling are :mod:`runs.actions.replicas_and_pools`'s.
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
from runs.backends.parallel_calls import NoAnswer, ask_all
from runs.exceptions import IllegalTransition
from runs.models import Replica, ReplicaAttempt, Run
from runs.reconcile import retry_policy
from runs.redaction import redact
from runs.states import RUN_LIVE, ReplicaState, RunState
from runs.task_queue import enqueue
from runs.transitions import transition_replica

_AT_ONCE = 40
"""Replicas whose backends are asked by one press of a button."""


def kill_replica(replica: Replica, *, actor: User) -> bool:
    """End its job now, as if it had failed: it is launched again by policy, and it counts against
    it. False where there is no job. Raises :class:`IllegalTransition` when none would follow."""
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
    """Its job is gone, whatever its backend says or cannot say; False where there is none. It is
    launched again by policy. A job that lives after all is ended by the reaper, and the newer
    incarnation keeps it out of every round."""
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
    """Replica id -> what its backend says of its newest job right now, in words. Asks all at once,
    and not for longer than :data:`runs.backends.parallel_calls.PATIENCE_S`."""
    found: dict[int, str] = {}
    questions = {}
    replicas = list(replicas)[:_AT_ONCE]
    for replica in replicas:
        pool = replica.pool
        last = replica.attempts.order_by("-number").first()
        if last is None or last.handle is None:
            found[replica.pk] = "has no job"
            continue
        handle, credential = ReplicaHandle(**last.handle), pool.credential

        def ask(
            backend: str = pool.backend,
            credential: object = credential,
            handle: ReplicaHandle = handle,
        ) -> ReplicaStatus:
            [status] = executor_of(backend, credential).poll([handle])  # type: ignore[arg-type]
            return status

        questions[str(replica.pk)] = ask
        found[replica.pk] = BACKENDS.get(pool.backend, pool.backend)
    wait_loaded({replica.pool.backend for replica in replicas})
    for pk, answer in ask_all(questions).items():
        found[int(pk)] += f" {_words(answer)}"
    return found


def _words(answer: ReplicaStatus | Exception) -> str:
    if isinstance(answer, ExecutorError | NoAnswer):
        return f"could not be asked: {redact(str(answer))}"
    if isinstance(answer, Exception):  # a client's own; its words may hold anything
        return f"could not be asked: {type(answer).__name__}"
    parts = [f"says {answer.state}"]
    if answer.phase and answer.phase.lower() != answer.state:
        parts.append(f"({answer.phase})")
    if answer.state == JobState.ENDED:
        parts.append(f"of {str(answer.cause or 'an unknown cause').replace('_', ' ')}")
    elif answer.started_wall_s is not None:
        began = datetime.fromtimestamp(answer.started_wall_s, tz=UTC)
        parts.append(f"since {began:%Y-%m-%d %H:%M} UTC")
    words = " ".join(parts)
    return f"{words}: {redact(answer.message)}" if answer.message else words
