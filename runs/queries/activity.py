"""Activity of a run: its events and its alerts in one list, newest first.

Events never change; an alert is one row that opens, closes and opens again. A row is placed at the
time at which it happened or opened last. Pages continue ``before`` the time and the id of their
last row.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.db.models import Q

from archipelago.run_page_rows import Activity
from runs.alerts.rules import KINDS
from runs.json_values import iso, row_of
from runs.models import Alert, Event, Run
from runs.times import in_utc

SOURCES = ("event", "alert")
LEVELS = {"warning": ("warning", "error"), "error": ("error",)}
"""Filter -> levels."""
LIMIT = 200
SEARCH_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Empty values match every row.

    Attributes:
        source: ``event`` or ``alert``.
        level: ``warning`` for warnings and errors, ``error`` for errors.
        replica: number of the replica.
        text: part of the message.
        before: only rows before this time.
    """

    source: str = ""
    level: str = ""
    replica: int | None = None
    text: str = ""
    before: datetime | None = None


def activity(
    run: Run, filters: Filters | None = None, *, limit: int = LIMIT
) -> list[dict[str, Any]]:
    """Rows of :class:`archipelago.run_page_rows.Activity`, newest first. At most two queries."""
    filters = filters or Filters()
    found: list[tuple[datetime, str, int, Any]] = []
    if filters.source in ("", "event"):
        events = Event.objects.filter(_matches(filters, "at"), run=run)
        rows = events.select_related("replica", "actor").order_by("-at", "-id")[:limit]
        found += [(event.at, "event", event.pk, event) for event in rows]
    if filters.source in ("", "alert"):
        alerts = Alert.objects.filter(_matches(filters, "opened_at"), run=run)
        related = alerts.select_related("replica", "acknowledged_by")
        newest = related.order_by("-opened_at", "-id")[:limit]
        found += [(alert.opened_at, "alert", alert.pk, alert) for alert in newest]
    found.sort(key=lambda one: one[:3], reverse=True)
    return [
        _alert(row) if source == "alert" else _event(row) for _, source, _, row in found[:limit]
    ]


def aware(at: datetime | None) -> datetime | None:
    """A time without a zone is in UTC."""
    return None if at is None else in_utc(at if at.tzinfo else at.replace(tzinfo=UTC))


def _matches(filters: Filters, at: str) -> Q:
    terms = Q()
    if filters.level in LEVELS:
        terms &= Q(level__in=LEVELS[filters.level])
    if filters.replica is not None:
        terms &= Q(replica__number=filters.replica)
    if filters.text:
        terms &= Q(message__icontains=filters.text[:SEARCH_CHARS])
    if filters.before is not None:
        terms &= Q(**{f"{at}__lt": filters.before})
    return terms


def _event(event: Event) -> dict[str, Any]:
    return row_of(
        Activity,
        event,
        source="event",
        title="",
        replica=event.replica.number if event.replica else None,
        actor=event.actor.get_username() if event.actor else None,
        closed_at=None,
        times=1,
        acknowledged_at=None,
        acknowledged_by=None,
    )


def _alert(alert: Alert) -> dict[str, Any]:
    by = alert.acknowledged_by
    return row_of(
        Activity,
        alert,
        source="alert",
        at=iso(alert.opened_at),
        title=KINDS.get(alert.kind, alert.kind),
        replica=alert.replica.number if alert.replica else None,
        actor=None,
        from_state="",
        to_state="",
        acknowledged_by=by.get_username() if by else None,
    )
