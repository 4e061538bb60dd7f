"""Creates attempts, alerts and events of an imported run from its journal."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.utils import timezone

from runs.exceptions import ActionRefused
from runs.ingest import journal_tables
from runs.models import Alert, Event, Replica, ReplicaAttempt, Run
from runs.reconcile.billing import cost_usd
from runs.restore.columns import columns
from runs.restore.journal_reader import JournalState


def store_attempts(run: Run, journal_state: JournalState, remarks: list[str]) -> None:
    """Store all attempts; the cost of open ones is calculated up to now."""
    replicas = {r.number: r for r in run.replicas.all()}
    names = journal_tables.ATTEMPT.columns
    known: set[tuple[int, int]] = set()
    attempts: list[ReplicaAttempt] = []
    for key, body in journal_state.attempts.items():
        replica = replicas.get(body["replica"])
        if replica is None:
            remarks.append(f"attempt {key}: there is no replica {body['replica']}")
            continue
        position = (body["replica"], body["number"])
        if position in known:
            raise ActionRefused(
                f"journal: attempts: expected one attempt {position}, found another"
            )
        known.add(position)
        attempt = ReplicaAttempt(replica=replica, **columns(ReplicaAttempt, body, names))
        if attempt.ended_at is None:
            attempt.cost_usd = cost_usd(
                price_usd_h=attempt.price_usd_h,
                launched_at=attempt.launched_at,
                started_at=attempt.started_at,
                ended_at=None,
                now=timezone.now(),
                earlier_usd=attempt.earlier_cost_usd,
            )
        attempts.append(attempt)
    ReplicaAttempt.objects.bulk_create(attempts)


def store_alerts(run: Run, journal_state: JournalState) -> None:
    """Store alerts unchanged, so that open ones are not opened and notified again."""
    replicas = {r.number: r for r in run.replicas.all()}
    names = {body.get("acknowledged_by") for body in journal_state.alerts.values()} - {None}
    users = {user.username: user for user in User.objects.filter(username__in=names)}
    alerts = []
    for body in journal_state.alerts.values():
        alert = Alert(run=run, **columns(Alert, body, journal_tables.ALERT.columns))
        alert.replica = replicas.get(body.get("replica", -1))
        alert.acknowledged_by = users.get(str(body.get("acknowledged_by")))
        alerts.append(alert)
    Alert.objects.bulk_create(alerts)


def store_events(run: Run, journal_state: JournalState, remarks: list[str]) -> None:
    """Store the journal's events unchanged, and new ones from reading that it lacks."""
    new_events = list(run.events.order_by("pk"))
    run.events.all().delete()
    replicas: dict[Any, Replica] = {r.number: r for r in run.replicas.all()}
    names = {body.get("actor") for body in journal_state.events} - {None}
    actors: dict[Any, User] = {
        user.username: user for user in User.objects.filter(username__in=names)
    }
    if missing := sorted(map(str, names - set(actors))):
        remarks.append(f"events by {', '.join(missing)}, who are not users here: no actor")
    events = [
        Event(
            run=run,
            replica=replicas.get(body.get("replica", -1)),
            actor=actors.get(body.get("actor", "")),
            **columns(Event, body, journal_tables.EVENT.columns),
        )
        for body in journal_state.events
    ]
    known = {(e.kind, e.replica_id, e.message) for e in events}
    events += [e for e in new_events if (e.kind, e.replica_id, e.message) not in known]
    for event in events:
        event.pk = None
    Event.objects.bulk_create(events)
