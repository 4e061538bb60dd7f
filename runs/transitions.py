"""Changes of state: a conditional UPDATE and an Event in one transaction.

``UPDATE ... WHERE state = <what we saw>`` moves one row or none. Whoever moved it acts; whoever did
not has lost a race and must look again. The tables of what may follow what are in
:mod:`runs.states`.

Left out on purpose: the phases a replica reports of itself (computing, uploading, waiting,
applying) are updated conditionally too but make no Event, or the list would hold nothing else;
their history is in the contributions' phase timings.
"""

from __future__ import annotations

import logging
from datetime import datetime
from functools import partial

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from runs import audit
from runs.exceptions import IllegalTransition
from runs.log_context import current
from runs.models import Event, Journal, Replica, Run
from runs.redaction import redact
from runs.states import (
    REPLICA_TRANSITIONS,
    REPLICA_WORKING,
    RUN_ENDED,
    RUN_LIVE,
    RUN_TRANSITIONS,
    ReplicaState,
    RunState,
)

logger = logging.getLogger(__name__)

_REASON_LIMIT = 4000

_RUN_LEVELS = {
    RunState.DEGRADED: Event.Level.WARNING,
    RunState.STALLED: Event.Level.WARNING,
    RunState.FAILED: Event.Level.ERROR,
}
_REPLICA_LEVELS = {
    ReplicaState.SUSPECT: Event.Level.WARNING,
    ReplicaState.LOST: Event.Level.WARNING,
    ReplicaState.RESTARTING: Event.Level.WARNING,
    ReplicaState.FAILED: Event.Level.ERROR,
}


def record_event(
    run: Run,
    kind: str,
    message: str,
    *,
    level: str = Event.Level.INFO,
    replica: Replica | None = None,
    actor: User | None = None,
    from_state: str = "",
    to_state: str = "",
) -> Event:
    """An Event, and a line in the log once it has been committed."""
    event = Event.objects.create(
        run=run,
        replica=replica,
        actor=actor,
        at=timezone.now(),
        level=level,
        kind=kind,
        from_state=from_state,
        to_state=to_state,
        message=clean_text(message),
    )
    if actor is not None:
        audit.record(f"run.{kind}", actor=actor, target=_target(run, replica), detail=event.message)
    extra: dict[str, str | int] = {**current(), "run": str(run.pk)}
    if replica is not None:
        extra["replica"] = replica.number
    transaction.on_commit(partial(_log, event, extra))
    return event


def _target(run: Run, replica: Replica | None) -> str:
    of_replica = "" if replica is None else f", replica {replica.number}"
    return f"run {run.pk} {run.name!r}{of_replica}"


def _log(event: Event, extra: dict[str, str | int]) -> None:
    who = f"run {extra['run']}" + (f", replica {extra['replica']}" if "replica" in extra else "")
    moved = f"{event.from_state} -> {event.to_state}: " if event.to_state else ""
    level = logging.getLevelNamesMapping()[str(event.level).upper()]
    logger.log(level, "%s: %s%s", who, moved, event.message or event.kind, extra=extra)


def clean_text(text: str, limit: int = _REASON_LIMIT) -> str:
    """Text from outside as any database takes it: no NUL, no half of a surrogate pair (JSON may
    hold one, UTF-8 cannot), not endless, and no secret in it."""
    text = redact(text).replace("\x00", "�").encode(errors="replace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def transition(
    run: Run,
    to: RunState,
    *,
    reason: str,
    actor: User | None = None,
    **more: float | str | datetime | None,
) -> bool:
    """Move ``run`` from the state this instance was read in; False if somebody else moved it.
    ``more`` are fields that are set in the same UPDATE.

    Raises :class:`IllegalTransition` for what the table does not know. On success the instance has
    the new state; on a lost race it is read again from the database.
    """
    old = RunState(run.state)
    if to not in RUN_TRANSITIONS[old]:
        raise IllegalTransition(f"run {run}", old, to)
    now = timezone.now()
    reason = clean_text(reason)
    fields: dict[str, float | str | datetime | None] = {
        "state": to,
        "state_reason": reason,
        "state_since": now,
        "end_due": to in RUN_ENDED,  # the alert of it: runs.alerts.store
        **more,
    }
    if to in RUN_LIVE and run.started_at is None:
        fields["started_at"] = now
    if to in RUN_ENDED:
        fields["ended_at"] = now
    if to == RunState.STOPPING:
        fields["stop_requested_at"] = now
    with transaction.atomic():
        if not Run.objects.filter(pk=run.pk, state=old).update(**fields):
            moved = False
        else:
            moved = True
            record_event(
                run, "run_state", reason, level=_RUN_LEVELS.get(to, Event.Level.INFO),
                actor=actor, from_state=old, to_state=to,
            )  # fmt: skip
            if to in RUN_ENDED:  # its journal is not complete before it says so
                Journal.objects.filter(run=run).update(due=True, marks=F("marks") + 1)
    if not moved:
        run.refresh_from_db()
        return False
    for name, value in fields.items():
        setattr(run, name, value)
    return True


def transition_replica(
    replica: Replica,
    to: ReplicaState,
    *,
    reason: str,
    actor: User | None = None,
    **fields: int | str | datetime | None,
) -> bool:
    """Like :func:`transition` for a replica; ``fields`` are set in the same UPDATE."""
    old = ReplicaState(replica.state)
    if to not in REPLICA_TRANSITIONS[old]:
        raise IllegalTransition(str(replica), old, to)
    reason = clean_text(reason)
    changes: dict[str, int | str | datetime | None] = {
        "state": to,
        "state_reason": reason,
        "state_since": timezone.now(),
        **fields,
    }
    with transaction.atomic():
        moved = bool(Replica.objects.filter(pk=replica.pk, state=old).update(**changes))
        if moved and not (old in REPLICA_WORKING and to in REPLICA_WORKING):
            record_event(
                replica.run, "replica_state", reason, replica=replica, actor=actor,
                level=_REPLICA_LEVELS.get(to, Event.Level.INFO), from_state=old, to_state=to,
            )  # fmt: skip
    if not moved:
        replica.refresh_from_db()
        return False
    for name, value in changes.items():
        setattr(replica, name, value)
    return True
