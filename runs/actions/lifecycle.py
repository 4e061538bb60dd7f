"""What people do with a run beside training it: pause it and send it on, resume what ended, save,
end by force, archive, describe, delete.

As in :mod:`runs.actions.replicas_and_pools` a function writes what is wanted and returns, and the
reconciler carries it out. Each is a conditional UPDATE and an Event with its actor; each returns
False where nothing was left to do, and raises :class:`CannotDo` where it will not work, with the
reason.

A **pause** asks every replica to hand in its work, save its state and leave, as a drain does, and
ends by force who has not left in time: nothing is billed afterwards. The replicas wait as
*restarting*, so that sending the run on launches the same identities. **Resume** does the same for
a run that failed or was stopped before it had final weights. Its rendezvous is its memory: newest
checkpoint, the log after it, and what each replica saved.
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

from runs.backends import circuit_breaker
from runs.exceptions import CannotDo
from runs.models import Checkpoint, Journal, ReplicaAttempt, ReplicaPool, Run
from runs.states import RUN_ENDED, RUN_LIVE, RUN_TRANSITIONS, ReplicaState, RunState
from runs.submit import prefixes
from runs.submit.create import add_replicas
from runs.task_queue import enqueue
from runs.transitions import clean_text, record_event, transition, transition_replica

NOTES_LENGTH = 20_000
TAG_LENGTH = 40
TAGS = 20

RESUMABLE = (RunState.FAILED, RunState.CANCELLED)


def pause(run: Run, *, actor: User) -> bool:
    """Let all replicas save and leave, and hold the run until :func:`unpause`."""
    while run.state not in (RunState.PAUSING, RunState.PAUSED):
        if RunState.PAUSING not in RUN_TRANSITIONS[RunState(run.state)]:
            raise CannotDo(f"expected a run that is working, found one {run.state}")
        with transaction.atomic():
            if transition(run, RunState.PAUSING, reason=f"paused by {actor}", actor=actor):
                enqueue("reconcile_run", str(run.pk))
                return True
    return False


def unpause(run: Run, *, actor: User) -> bool:
    """Launch the replicas of a paused run again."""
    if run.state != RunState.PAUSED:
        if run.state in RUN_LIVE | {RunState.QUEUED, RunState.PROVISIONING}:
            return False
        words = "its machines are still being released" if run.state == RunState.PAUSING else ""
        raise CannotDo(words or f"expected a run that is paused, found one {run.state}")
    with transaction.atomic():
        if not _send_on(run, since=run.state_since, reason=f"resumed by {actor}", actor=actor):
            return False
        for pool in run.pools.all():
            circuit_breaker.person_looked(pool)
        enqueue("launch_run", str(run.pk))
    return True


def resume(run: Run, *, actor: User) -> bool:
    """Let a run that failed or was stopped go on from its newest checkpoint and log."""
    if run.state in (RunState.PAUSED, RunState.PAUSING):
        return unpause(run, actor=actor)
    why = why_not_resumed(run)
    if why:
        raise CannotDo(why)
    with transaction.atomic():
        locked = Run.objects.select_for_update().get(pk=run.pk)
        since = locked.ended_at or locked.state_since
        if not _send_on(run, since=since, reason=f"resumed by {actor}", actor=actor):
            return False
        for pool in run.pools.select_for_update():
            pool.run = run
            circuit_breaker.person_looked(pool)
            _bring_back(pool, actor=actor)
        enqueue("launch_run", str(run.pk))
    return True


def why_not_resumed(run: Run) -> str:
    """What keeps an ended run from going on; '' for nothing that the database knows of. That no
    final weights lie in the bucket is looked at once more when it is launched."""
    if run.state not in RESUMABLE:
        return f"expected a run that failed or was stopped, found one {run.state}"
    if run.delete_requested_at is not None:
        return "it is being deleted"
    if Checkpoint.objects.filter(run=run, final=True).exists():
        return (
            "its final weights are written, and what is final does not change: "
            "fork a new run from its newest checkpoint"
        )
    if ReplicaAttempt.objects.filter(replica__run=run, ended_at=None).exists():
        return "its machines are still being released; try again in a moment"
    return ""


def _send_on(run: Run, *, since: datetime, reason: str, actor: User) -> bool:
    """Back to the queue, with the time since then taken out of the run's own."""
    now = timezone.now()
    return transition(
        run, RunState.QUEUED, reason=reason, actor=actor,
        resumed_at=now, idle_s=run.idle_s + max((now - since).total_seconds(), 0.0),
        ended_at=None, stop_requested_at=None, stop_sent_at=None, cancel_at=None,
        archived_at=None,
    )  # fmt: skip


def _bring_back(pool: ReplicaPool, *, actor: User) -> None:
    """As many replicas as the pool wants: those that were there, else new ones."""
    replicas = list(pool.replicas.order_by("number"))
    missing = pool.count - sum(not replica.ended for replica in replicas)
    gone = [replica for replica in replicas if replica.ended][: max(missing, 0)]
    for replica in gone:
        replica.run = pool.run
        transition_replica(
            replica, ReplicaState.RESTARTING, reason=f"resumed by {actor}", actor=actor,
            restarts=0, relaunch_at=None, cancel_at=None, drain_sent_at=None, fell_at=None,
        )  # fmt: skip
    room = int(pool.run.group_settings["max_replicas"]) - pool.run.replicas.count()
    add_replicas(pool, min(max(missing - len(gone), 0), room), now=timezone.now())


def save(run: Run, *, actor: User) -> bool:
    """Ask for a checkpoint of the next round that is committed."""
    if run.state not in RUN_LIVE:
        raise CannotDo(f"expected a run that is training, found one {run.state}")
    with transaction.atomic():
        if not Run.objects.filter(pk=run.pk, state__in=RUN_LIVE).update(
            save_requested_at=timezone.now()
        ):
            return False
        record_event(run, "save", "a checkpoint of the next round was asked for", actor=actor)
        enqueue("reconcile_run", str(run.pk))
    return True


def force_stop(run: Run, *, actor: User) -> bool:
    """End the run and its jobs now. Work since the last round, and final weights, may be lost."""
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
    """Leave a run that is over out of lists, or take it in again."""
    if archived and run.state not in RUN_ENDED:
        raise CannotDo(f"expected a run that is over, found one {run.state}")
    with transaction.atomic():
        changed = Run.objects.filter(pk=run.pk, archived_at__isnull=archived).update(
            archived_at=timezone.now() if archived else None
        )
        if changed:
            record_event(run, "archived", "archived" if archived else "in lists again", actor=actor)
            note_in_journal(run)
    run.refresh_from_db(fields=["archived_at"])
    return bool(changed)


def describe(run: Run, *, notes: str, tags: Iterable[str], actor: User) -> bool:
    """Replace notes and tags. Raises :class:`CannotDo` for tags that are none."""
    notes = clean_text(notes.strip(), NOTES_LENGTH)
    chosen = parse_tags(tags)
    with transaction.atomic():
        locked = Run.objects.select_for_update().get(pk=run.pk)
        changed = []
        if locked.notes != notes:
            changed.append("notes changed")
        if locked.tags != chosen:
            changed.append(f"tags: {', '.join(chosen) or 'none'}")
        if not changed:
            return False
        Run.objects.filter(pk=run.pk).update(notes=notes, tags=chosen)
        record_event(run, "described", "; ".join(changed), actor=actor)
        note_in_journal(run)
    run.notes, run.tags = notes, chosen
    return True


def parse_tags(tags: Iterable[str]) -> list[str]:
    """Each once, in the order given; a tag has no space and no comma, as queries divide there."""
    found = list(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
    for tag in found:
        odd = any(sign.isspace() or not sign.isprintable() or sign in ",:" for sign in tag)
        if odd or len(tag) > TAG_LENGTH:
            raise CannotDo(
                f"expected tags of 1 to {TAG_LENGTH} characters without space, comma and colon, "
                f"found {tag[:TAG_LENGTH]!r}"
            )
    if len(found) > TAGS:
        raise CannotDo(f"expected at most {TAGS} tags, found {len(found)}")
    return found


def note_in_journal(run: Run) -> None:
    """Have what changed of a run written into its bucket, also when nobody looks after it."""
    Journal.objects.update_or_create(run=run, defaults={"due": True})
    enqueue("reconcile_run", str(run.pk))


def why_not_deleted(runs: Collection[Run]) -> dict[UUID, str]:
    """What keeps runs from being deleted as they are, in one query; those that nothing keeps are
    left out. Whether another's rendezvous lies inside is asked only when objects are to go."""
    ids = [run.pk for run in runs]
    jobs = ReplicaAttempt.objects.filter(replica__run__in=ids, ended_at=None)
    busy = set(jobs.values_list("replica__run", flat=True))
    found = {}
    for run in runs:
        if run.delete_requested_at is not None:
            found[run.pk] = "it is being deleted already"
        elif run.state not in RUN_ENDED:
            found[run.pk] = f"expected a run that is over, found one {run.state}"
        elif run.pk in busy:
            found[run.pk] = "its machines are still being released; try again in a moment"
    return found


def delete(run: Run, *, actor: User, name: str, objects: bool) -> None:
    """Delete the run's rows, and with ``objects`` what it left in its rendezvous.

    ``name`` is the run's, typed by whoever wants this. Who did it is kept in the administration's
    log, as the run's own events go with it.
    """
    if name != run.name:
        raise CannotDo(f"expected the name of the run, {run.name!r}, found {name[:80]!r}")
    with transaction.atomic():
        locked = Run.objects.select_for_update().get(pk=run.pk)
        why = why_not_deleted([locked])
        if why:
            raise CannotDo(why[locked.pk])
        if objects:
            inside = sharing(locked)
            if inside is not None:
                raise CannotDo(f"the rendezvous of {inside.name!r} lies inside this one's")
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
        record_event(run, "deleted", f"to be deleted, {words}", actor=actor)
        enqueue("delete_run", str(run.pk))


def sharing(run: Run) -> Run | None:
    """Another run whose prefix is this one's or lies inside it."""
    return prefixes.inside(run)
