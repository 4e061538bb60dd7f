"""What people can do to runs: create, stop, stop or restart one replica.

A service writes what is wanted into the database and returns; workers carry it out. Nothing here
calls a backend or the bucket. Who may do what is :func:`runs.selectors.may_operate`, asked by the
caller.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.utils import timezone

from executors.registry import BACKENDS
from runs.exceptions import IllegalTransition, InvalidRun
from runs.models import Replica, ReplicaPool, Run
from runs.presets import RunDraft
from runs.queue import enqueue
from runs.states import RUN_ENDED, RUN_TRANSITIONS, ReplicaState, RunState
from runs.transitions import record_event, transition, transition_replica

__all__ = [
    "create_run",
    "request_stop",
    "restart_replica",
    "stop_replica",
    "transition",
    "transition_replica",
]

NAME_LENGTH = 80
RENDEZVOUS_LENGTH = 500
SUBMIT_KEY_LENGTH = 64
POOL_LIMIT = 1024


def create_run(draft: RunDraft, *, owner: User, submit_key: str) -> Run:
    """Store the run, its pools and replicas in state queued and enqueue the launch on commit.

    One ``submit_key`` makes one run however often and however concurrently it is sent: the second
    gets the first one's run. Raises :class:`InvalidRun` with the form field that is wrong.
    """
    if not submit_key or len(submit_key) > SUBMIT_KEY_LENGTH:
        raise InvalidRun(
            "submit_key", f"expected 1 to {SUBMIT_KEY_LENGTH} characters, found {len(submit_key)}"
        )
    existing = _submitted(submit_key, owner)
    if existing is not None:
        return existing
    run_id = uuid.uuid4()
    rendezvous = check_draft(draft, run_id)
    try:
        with transaction.atomic():
            return _store(draft, run_id, rendezvous, owner, submit_key)
    except IntegrityError:
        # Another request with this key was faster; anything else is a bug and stays one.
        existing = _submitted(submit_key, owner)
        if existing is None:
            raise
        return existing


def _submitted(submit_key: str, owner: User) -> Run | None:
    run = Run.objects.filter(submit_key=submit_key).first()
    if run is not None and run.owner_id != owner.pk:
        raise InvalidRun("submit_key", "this form was sent by somebody else; open it again")
    return run


def check_draft(draft: RunDraft, run_id: uuid.UUID) -> str:
    """The rendezvous URI of a draft that is all right; :class:`InvalidRun` otherwise."""
    name = draft.name.strip()
    if not name or len(name) > NAME_LENGTH:
        raise InvalidRun("name", f"expected 1 to {NAME_LENGTH} characters, found {len(name)}")
    if not draft.pools:
        raise InvalidRun("pools", "expected at least one pool of replicas, found none")
    for pool in draft.pools:
        if pool.backend not in BACKENDS:
            raise InvalidRun(
                "pools", f"expected a backend of {', '.join(BACKENDS)}, found {pool.backend!r}"
            )
        if not 1 <= pool.count <= POOL_LIMIT:
            raise InvalidRun(
                "pools", f"expected 1 to {POOL_LIMIT} replicas in a pool, found {pool.count}"
            )
    total, target = sum(pool.count for pool in draft.pools), draft.settings.num_replicas
    if total != target:
        raise InvalidRun(
            "pools", f"expected pools that add up to the target of {target} replicas, found {total}"
        )
    if draft.time_limit_s < 0:
        raise InvalidRun("time_limit_s", f"expected 0 or more seconds, found {draft.time_limit_s}")
    rendezvous = rendezvous_uri(draft.rendezvous, run_id)
    if Run.objects.filter(rendezvous=rendezvous).exists():
        raise InvalidRun(
            "rendezvous", f"expected a prefix no run has used, found one that has: {rendezvous}"
        )
    return rendezvous


def rendezvous_uri(wanted: str, run_id: uuid.UUID) -> str:
    """One spelling per place: no trailing slash, local paths as ``file://`` URIs."""
    wanted = wanted.strip()
    if not wanted:
        return f"{settings.DEFAULT_RENDEZVOUS.rstrip('/')}/{run_id}"
    if not urlsplit(wanted).scheme:
        if not Path(wanted).is_absolute():
            raise InvalidRun("rendezvous", f"expected a URI or an absolute path, found {wanted!r}")
        wanted = Path(wanted).as_uri()
    if len(wanted) > RENDEZVOUS_LENGTH:
        raise InvalidRun(
            "rendezvous", f"expected at most {RENDEZVOUS_LENGTH} characters, found {len(wanted)}"
        )
    return wanted.rstrip("/")


def _store(
    draft: RunDraft, run_id: uuid.UUID, rendezvous: str, owner: User, submit_key: str
) -> Run:
    now = timezone.now()
    run = Run.objects.create(
        id=run_id,
        name=draft.name.strip(),
        owner=owner,
        state=RunState.QUEUED,
        state_since=now,
        state_reason="waiting for a worker",
        rendezvous=rendezvous,
        group_settings=draft.settings.to_dict(),
        workload=draft.workload.to_dict(),
        submit_key=submit_key,
        time_limit_s=draft.time_limit_s,
        created_at=now,
    )
    number = 0
    replicas: list[Replica] = []
    for pool_draft in draft.pools:
        pool = ReplicaPool.objects.create(
            run=run,
            backend=pool_draft.backend,
            hardware=pool_draft.hardware,
            count=pool_draft.count,
        )
        for _ in range(pool_draft.count):
            replicas.append(Replica(run=run, pool=pool, number=number, state_since=now))
            number += 1
    Replica.objects.bulk_create(replicas)
    record_event(
        run, "run_state", "submitted", actor=owner,
        from_state=RunState.DRAFT, to_state=RunState.QUEUED,
    )  # fmt: skip
    enqueue("launch_run", str(run.pk))
    return run


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
