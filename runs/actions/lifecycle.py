"""Actions on a whole run: pause, resume, save, end by force, archive, describe, delete.

As in :mod:`runs.actions.replicas_and_pools`, a function writes the desired state and returns; the
reconciler carries it out. Each is a conditional UPDATE and an Event with its actor. Each returns
False if there is nothing to do and raises :class:`ActionRefused` with the reason if it is not
possible.

A **pause** drains every replica: it contributes its local steps, saves its state and exits.
Replicas that do not exit in time are ended, so nothing is billed afterwards. They wait as
*restarting*, so that unpausing launches the same identities. **Resume** does the same for a run
that failed or was stopped before it had final weights. The run continues from its bucket: the
newest checkpoint, the commits after it, and the saved state of each replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from uuid import UUID

from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.db import transaction
from django.utils import timezone

from runs.actions.retained_spend import end_tags
from runs.backends import budgets, circuit_breaker
from runs.exceptions import ActionRefused
from runs.ingest.journal import mark_due
from runs.json_values import texts
from runs.models import Checkpoint, ReplicaAttempt, ReplicaPool, Run
from runs.redaction import clean_text
from runs.states import RUN_ENDED, RUN_LIVE, RUN_TRANSITIONS, ReplicaState, RunState
from runs.submit import prefixes
from runs.submit.create import add_replicas
from runs.submit.tags import parse_tags
from runs.task_queue import enqueue
from runs.transitions import record_event, transition, transition_replica

NOTES_LENGTH = 20_000

RESUMABLE = (RunState.FAILED, RunState.CANCELLED)


def pause(run: Run, *, actor: User) -> bool:
    """Save and release all replicas, and hold the run until :func:`unpause`."""
    while run.state not in (RunState.PAUSING, RunState.PAUSED):
        if RunState.PAUSING not in RUN_TRANSITIONS[RunState(run.state)]:
            raise ActionRefused(f"expected a run that is working, found one {run.state}")
        with transaction.atomic():
            if transition(run, RunState.PAUSING, reason=f"paused by {actor}", actor=actor):
                enqueue("reconcile_run", str(run.pk))
                return True
    return False


def unpause(run: Run, *, actor: User) -> bool:
    """Relaunch the replicas of a paused run."""
    if run.state != RunState.PAUSED:
        if run.state in RUN_LIVE | {RunState.QUEUED, RunState.PROVISIONING}:
            return False
        words = "its machines are still being released" if run.state == RunState.PAUSING else ""
        raise ActionRefused(words or f"expected a run that is paused, found one {run.state}")
    with transaction.atomic():
        if not _requeue(run, since=run.state_since, reason=f"resumed by {actor}", actor=actor):
            return False
        for pool in run.pools.all():
            circuit_breaker.reset(pool)
        enqueue("launch_run", str(run.pk))
    return True


def resume(run: Run, *, actor: User) -> bool:
    """Continue a failed or stopped run from its newest checkpoint and the commits after it."""
    if refusal := budgets.refusal_of(run, timezone.now()):
        raise ActionRefused(f"expected a budget that allows launches, found: {refusal}")
    if run.state in (RunState.PAUSED, RunState.PAUSING):
        return unpause(run, actor=actor)
    reason = why_not_resumed(run)
    if reason:
        raise ActionRefused(reason)
    with transaction.atomic():
        locked = Run.objects.select_for_update().get(pk=run.pk)
        if locked.delete_requested_at is not None:  # requested since ``run`` was read
            raise ActionRefused(why_not_resumed(locked))
        since = locked.ended_at or locked.state_since
        if not _requeue(run, since=since, reason=f"resumed by {actor}", actor=actor):
            return False
        for pool in run.pools.select_for_update():
            pool.run = run
            circuit_breaker.reset(pool)
            _restore_pool(pool, actor=actor)
        enqueue("launch_run", str(run.pk))
    return True


def why_not_resumed(run: Run) -> str:
    """Why an ended run cannot be resumed, as far as the database shows; '' if it can. The launch
    checks the bucket for final weights again."""
    if run.state not in RESUMABLE:
        return f"expected a run that failed or was stopped, found one {run.state}"
    if run.delete_requested_at is not None:
        return "it is being deleted"
    if Checkpoint.objects.filter(run=run, final=True).exists():
        return (
            "its final weights are written; a finished run can't be resumed, "
            "fork a new run from its newest checkpoint"
        )
    if ReplicaAttempt.objects.filter(replica__run=run, ended_at=None).exists():
        return "its machines are still being released; try again in a moment"
    return ""


def _requeue(run: Run, *, since: datetime, reason: str, actor: User) -> bool:
    """Put the run back into the queue and subtract the time since ``since`` from its age."""
    now = timezone.now()
    return transition(
        run,
        RunState.QUEUED,
        reason=reason,
        actor=actor,
        resumed_at=now,
        idle_s=run.idle_s + max((now - since).total_seconds(), 0.0),
        ended_at=None,
        stop_requested_at=None,
        stop_sent_at=None,
        cancel_at=None,
        archived_at=None,
    )


def _restore_pool(pool: ReplicaPool, *, actor: User) -> None:
    """Restore the pool's replica count: earlier replicas first, then new ones."""
    replicas = list(pool.replicas.order_by("number"))
    missing = pool.count - sum(not replica.ended for replica in replicas)
    returning = [replica for replica in replicas if replica.ended][: max(missing, 0)]
    for replica in returning:
        replica.run = pool.run
        transition_replica(
            replica,
            ReplicaState.RESTARTING,
            reason=f"resumed by {actor}",
            actor=actor,
            restarts=0,
            relaunch_at=None,
            cancel_at=None,
            drain_sent_at=None,
            fell_at=None,
        )
    room = int(pool.run.group_settings["max_replicas"]) - pool.run.replicas.count()
    add_replicas(pool, min(max(missing - len(returning), 0), room), now=timezone.now())


def save(run: Run, *, actor: User) -> bool:
    """Request a checkpoint of the next committed round."""
    if run.state not in RUN_LIVE:
        raise ActionRefused(f"expected a run that is training, found one {run.state}")
    with transaction.atomic():
        if not Run.objects.filter(pk=run.pk, state__in=RUN_LIVE).update(
            save_requested_at=timezone.now()
        ):
            return False
        record_event(run, "save", "a checkpoint of the next round was requested", actor=actor)
        enqueue("reconcile_run", str(run.pk))
    return True


def force_stop(run: Run, *, actor: User) -> bool:
    """End the run and its jobs now. Steps since the last round, and final weights, can be lost."""
    with transaction.atomic():
        locked = Run.objects.select_for_update().get(pk=run.pk)
        if locked.state in RUN_ENDED or locked.cancel_at is not None:
            return False
        now, reason = timezone.now(), f"stopped by force by {actor}"
        if locked.state == RunState.STOPPING:
            Run.objects.filter(pk=run.pk).update(cancel_at=now, state_reason=reason)
            record_event(run, "force_stop", reason, actor=actor)
        else:
            transition(locked, RunState.STOPPING, reason=reason, actor=actor, cancel_at=now)
        enqueue("reconcile_run", str(run.pk))
    run.refresh_from_db()
    return True


def archive(run: Run, *, actor: User, archived: bool = True) -> bool:
    """Hide an ended run from lists, or show it again."""
    if archived and run.state not in RUN_ENDED:
        raise ActionRefused(f"expected a run that is over, found one {run.state}")
    with transaction.atomic():
        changed = Run.objects.filter(pk=run.pk, archived_at__isnull=archived).update(
            archived_at=timezone.now() if archived else None
        )
        if changed:
            record_event(run, "archived", "archived" if archived else "in lists again", actor=actor)
            note_in_journal(run)
    run.refresh_from_db(fields=["archived_at"])
    return bool(changed)


def describe(
    run: Run,
    *,
    notes: str | None = None,
    tags: Iterable[str] | None = None,
    more_tags: Iterable[str] = (),
    actor: User,
) -> bool:
    """Replace notes and tags, each unless it is None, and add ``more_tags``. The spending so far
    stays with the tags until now.

    Raises :class:`ActionRefused` for invalid tags.
    """
    with transaction.atomic():
        locked = Run.objects.select_for_update().get(pk=run.pk)
        notes = locked.notes if notes is None else clean_text(notes.strip(), NOTES_LENGTH)
        chosen = parse_tags([*(texts(locked.tags) if tags is None else tags), *more_tags])
        changed = []
        if locked.notes != notes:
            changed.append("notes changed")
        if locked.tags != chosen:
            end_tags(locked, now=timezone.now())
            changed.append(f"tags: {', '.join(chosen) or 'none'}")
        if not changed:
            return False
        Run.objects.filter(pk=run.pk).update(notes=notes, tags=chosen)
        record_event(run, "described", "; ".join(changed), actor=actor)
        note_in_journal(run)
    run.notes, run.tags = notes, chosen
    return True


def note_in_journal(run: Run) -> None:
    """Mark the journal as due, also for an ended run without control ticks."""
    mark_due(run)
    enqueue("reconcile_run", str(run.pk))


def why_not_deleted(runs: Collection[Run]) -> dict[UUID, str]:
    """Why each run cannot be deleted, in one query; deletable runs are left out. Whether another
    rendezvous is inside is checked only if objects are deleted."""
    ids = [run.pk for run in runs]
    jobs = ReplicaAttempt.objects.filter(replica__run__in=ids, ended_at=None)
    busy = set(jobs.values_list("replica__run", flat=True))
    reasons = {}
    for run in runs:
        if run.delete_requested_at is not None:
            reasons[run.pk] = "it is being deleted already"
        elif run.state not in RUN_ENDED:
            reasons[run.pk] = f"expected a run that is over, found one {run.state}"
        elif run.pk in busy:
            reasons[run.pk] = "its machines are still being released; try again in a moment"
    return reasons


def delete(run: Run, *, actor: User, name: str, objects: bool) -> None:
    """Delete the run's rows, and with ``objects`` also its objects in the bucket.

    ``name`` is the run's name, typed as confirmation. The actor is recorded in the admin log,
    because the run's own events are deleted.
    """
    if name != run.name:
        raise ActionRefused(f"expected the name of the run, {run.name!r}, found {name[:80]!r}")
    with transaction.atomic():
        locked = Run.objects.select_for_update().get(pk=run.pk)
        reasons = why_not_deleted([locked])
        if reasons:
            raise ActionRefused(reasons[locked.pk])
        if objects:
            inside = prefixes.inside(locked)
            if inside is not None:
                raise ActionRefused(f"the rendezvous of {inside.name!r} is inside this one")
        Run.objects.filter(pk=run.pk).update(
            delete_requested_at=timezone.now(), delete_objects=objects
        )
        LogEntry.objects.create(
            user=actor,
            content_type=ContentType.objects.get_for_model(Run),
            object_id=str(run.pk),
            object_repr=run.name[:200],
            action_flag=DELETION,
            change_message="with its objects" if objects else "its objects are kept",
        )
        words = "its objects" if objects else "its objects are kept"
        record_event(run, "deleted", f"deletion requested, {words}", actor=actor)
        enqueue("delete_run", str(run.pk))
