"""State transitions: a conditional UPDATE and an Event in one transaction.

``UPDATE ... WHERE state = <expected>`` changes one row or none. The process that changed it goes on
to act; a process that did not has lost a race and reads the row again. The allowed transitions are
in :mod:`runs.states`.

The phases that a replica reports (computing, uploading, waiting, applying) are also updated
conditionally, but without an Event: there would be too many. The phase timings of contributions
hold their history.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from runs import audit
from runs.exceptions import IllegalTransition
from runs.log_context import current
from runs.models import Event, Journal, Replica, Run
from runs.redaction import clean_text
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
    """Store an Event, and log it once the transaction is committed."""
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
    subject = f"run {extra['run']}"
    if "replica" in extra:
        subject += f", replica {extra['replica']}"
    change = f"{event.from_state} -> {event.to_state}: " if event.to_state else ""
    level = logging.getLevelNamesMapping()[str(event.level).upper()]
    logger.log(level, "%s: %s%s", subject, change, event.message or event.kind, extra=extra)


def transition(
    run: Run,
    to: RunState,
    *,
    reason: str,
    actor: User | None = None,
    **more: float | str | datetime | None,
) -> bool:
    """Change the state of ``run``; False if another process changed it first.

    On success the instance has the new state; after a lost race it is read again from the database.

    Args:
        run: the run, with the state that the caller expects.
        to: the new state.
        reason: shown to users, and stored in the Event.
        actor: the user who requested the change, if any.
        more: further fields to set in the same UPDATE.

    Raises :class:`IllegalTransition` if the table does not contain the transition.
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
        "end_due": to in RUN_ENDED,  # runs.alerts.store opens the alert
        **more,
    }
    if to in RUN_LIVE and run.started_at is None:
        fields["started_at"] = now
    if to in RUN_ENDED:
        fields["ended_at"] = now
    if to == RunState.STOPPING:
        fields["stop_requested_at"] = now
    with transaction.atomic():
        moved = bool(Run.objects.filter(pk=run.pk, state=old).update(**fields))
        if moved:
            level = _RUN_LEVELS.get(to, Event.Level.INFO)
            record_event(
                run, "run_state", reason, level=level, actor=actor, from_state=old, to_state=to
            )
            if to in RUN_ENDED:  # the journal must contain the end
                Journal.objects.filter(run=run).update(due=True, marks=F("marks") + 1)
    return _follow(run, moved, fields)


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
                replica.run,
                "replica_state",
                reason,
                level=_REPLICA_LEVELS.get(to, Event.Level.INFO),
                replica=replica,
                actor=actor,
                from_state=old,
                to_state=to,
            )
    return _follow(replica, moved, changes)


def _follow(row: Run | Replica, moved: bool, changes: Mapping[str, Any]) -> bool:
    """Give the instance the changed fields of its row, or read it again after a lost race."""
    if not moved:
        row.refresh_from_db()
        return False
    for name, value in changes.items():
        setattr(row, name, value)
    return True
