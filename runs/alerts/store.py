"""Store alerts: open, close and reopen one row per run, kind and subject.

Every tick evaluates :mod:`runs.alerts.rules` and updates the table with conditional writes. The
process that opens a row sends the notifications (:func:`notify`). A row that reopens within
:data:`COOL_DOWN` of its last notification stays acknowledged and sends none, so that a condition
that flaps does not notify each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from archipelago import rows
from runs import audit, live_stream
from runs.alerts import webhooks
from runs.alerts.alert_view import AlertView
from runs.alerts.rules import KINDS, Finding, RuleResult, apply_rules
from runs.alerts.tick_view import AlertContext, alert_view
from runs.bulk import update_row
from runs.json_values import row_of
from runs.models import Alert, Replica, Run
from runs.redaction import clean_text
from runs.states import RUN_ENDED
from runs.times import has_passed
from runs.transitions import record_event

COOL_DOWN = timedelta(minutes=15)

WITH_EVENT = frozenset({"spike", "goodput", "budget", "deadline", "ingest_lag"})
"""Kinds about which no other event is recorded."""

LISTED = 200
"""Rows that a page shows, newest first."""


def evaluate(context: AlertContext) -> None:
    """Evaluate the alert rules at the end of a tick. The end of a run is evaluated once."""
    run, now = context.run, context.now
    if run.state in RUN_ENDED and not run.end_due and run.watched_round == run.committed_rounds:
        return
    known = {(a.kind, a.subject): a for a in Alert.objects.filter(run=run, closed_at=None)}
    view = alert_view(context, known)
    result = apply_rules(view)
    changed = not _is_unchanged(result, known)
    if not changed and not _progress(run, view):
        return
    with transaction.atomic():  # a killed process leaves no open alert without notification
        opened = sync(run, result, known, replicas=context.replicas, now=now)
        for alert in opened:
            if alert.notified_at == alert.opened_at:
                notify(alert)
        if progress := _progress(run, view):
            update_row(run, Q(state=run.state), **progress)
    if changed:
        context.changes.run = True
        transaction.on_commit(live_stream.announce_alerts)


def _is_unchanged(result: RuleResult, known: dict[tuple[str, str], Alert]) -> bool:
    """Whether no alert has to be opened, closed or rewritten."""
    if outdated(result.findings, known):
        return False
    found = {(f.kind, f.subject) for f in result.findings}
    return found <= known.keys() and all(key in found or result.is_undecided(*key) for key in known)


def outdated(findings: Iterable[Finding], known: dict[tuple[str, str], Alert]) -> list[Finding]:
    """Findings whose open alert names another limit, because an operator has changed it."""
    pairs = [(finding, known.get((finding.kind, finding.subject))) for finding in findings]
    return [f for f, alert in pairs if alert is not None and f.limit not in alert.message]


def _progress(run: Run, view: AlertView) -> dict[str, Any]:
    """Fields of the run that record the evaluation of its end and of its rounds."""
    fields: dict[str, Any] = {}
    if run.end_due and view.state in RUN_ENDED:
        fields["end_due"] = False
    evaluated = view.rounds is not None or view.state in RUN_ENDED
    if evaluated and run.watched_round != run.committed_rounds:
        fields["watched_round"] = run.committed_rounds
    return fields


def notify(alert: Alert) -> None:
    """Send all notifications about a newly opened alert."""
    if alert.kind in WITH_EVENT and alert.run is not None:
        message = f"{KINDS[alert.kind]}: {alert.message}"
        record_event(alert.run, "alert", message, level=alert.level, replica=alert.replica)
    webhooks.announce(alert)


def sync(
    run: Run | None,
    result: RuleResult,
    known: dict[tuple[str, str], Alert],
    *,
    replicas: Iterable[Replica] = (),
    now: datetime,
) -> list[Alert]:
    """Open new alerts, close those whose condition no longer holds, and rewrite those whose limit
    was changed.

    ``run`` None: alerts whose cause several runs share. ``known`` are the open alerts;
    ``closed_at`` is set on those that are closed. Returns the alerts that were opened.
    """
    findings = {(f.kind, f.subject): f for f in result.findings}
    ids = {replica.number: replica.pk for replica in replicas}
    opened = []
    for key, finding in findings.items():
        if key in known:
            continue
        replica_id = ids.get(finding.replica) if finding.replica is not None else None
        alert = _open(run, finding, replica_id, now)
        if alert is not None:
            opened.append(alert)
    for finding in outdated(result.findings, known):
        alert = known[finding.kind, finding.subject]
        update_row(alert, Q(closed_at=None), message=clean_text(finding.message))
    for key, alert in known.items():
        if key in findings or result.is_undecided(*key):
            continue
        update_row(alert, Q(closed_at=None), closed_at=now)
    return opened


def _open(run: Run | None, finding: Finding, replica_id: int | None, now: datetime) -> Alert | None:
    """Open an alert: its row, or None if another process opened it.

    An alert about the end of a run is closed at once.
    """
    ends = run is not None and finding.kind == "finished"
    if run is not None and ends:  # the time identifies this end, however often it is evaluated
        now = run.state_since
    closed_at = now if ends else None
    message = clean_text(finding.message)
    alert, made = Alert.objects.get_or_create(
        run=run,
        kind=finding.kind,
        subject=finding.subject,
        defaults={
            "replica_id": replica_id,
            "level": finding.level,
            "message": message,
            "first_at": now,
            "opened_at": now,
            "closed_at": closed_at,
            "notified_at": now,
        },
    )
    if made:
        return alert
    if ends and alert.opened_at == now:
        return None
    changes: dict[str, Any] = {
        "replica_id": replica_id,
        "level": finding.level,
        "message": message,
        "opened_at": now,
        "closed_at": closed_at,
        "times": F("times") + 1,
    }
    if ends or alert.notified_at is None or has_passed(alert.notified_at, COOL_DOWN, now):
        changes |= {"notified_at": now, "acknowledged_at": None, "acknowledged_by": None}
    unchanged = Q(pk=alert.pk, closed_at__isnull=False, times=alert.times)
    if not Alert.objects.filter(unchanged).update(**changes):
        return None
    alert.refresh_from_db()
    return alert


def acknowledge(alert: Alert, *, actor: User) -> bool:
    """Acknowledge an alert; False if it was already acknowledged."""
    with transaction.atomic():
        changed = Alert.objects.filter(pk=alert.pk, acknowledged_at=None).update(
            acknowledged_at=timezone.now(), acknowledged_by=actor
        )
        if changed:
            message = f"acknowledged: {KINDS.get(alert.kind, alert.kind)}: {alert.message}"
            if alert.run is not None:
                record_event(alert.run, "alert", message, replica=alert.replica, actor=actor)
            else:
                audit.record("alert.acknowledged", actor=actor, target=alert, detail=message)
            transaction.on_commit(live_stream.announce_alerts)
    return bool(changed)


def alert_rows(run: Run) -> list[dict[str, Any]]:
    """Alerts of a run for pages and the API: open ones first, then newest first. One query."""
    alerts = Alert.objects.filter(run=run).select_related("replica", "acknowledged_by")
    newest = alerts.order_by(F("closed_at").desc(nulls_first=True), "-opened_at", "-id")[:LISTED]
    return [
        row_of(
            rows.Alert,
            alert,
            title=KINDS.get(alert.kind, alert.kind),
            replica=alert.replica.number if alert.replica else None,
            acknowledged_by=alert.acknowledged_by and alert.acknowledged_by.get_username(),
        )
        for alert in newest
    ]
