"""Alerts of all runs, as the bell and the page of alerts show them.

The alerts *firing* are open. The *recent* ones are all, by the time at which they last opened. An
alert is unread by a user if it opened after the user last read the alerts, and is not acknowledged.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.db import connection
from django.db.models import Q, QuerySet

from archipelago import frame_rows
from runs.alerts.rules import KINDS
from runs.json_values import row_of
from runs.models import Alert, AlertsRead
from runs.permissions import can_view
from runs.queries import keyset

PAGE = 50
MOST_UNREAD = 100
"""Unread alerts that are counted: the bell shows ``99+``."""


@dataclass(frozen=True, kw_only=True)
class AlertFilter:
    """Filters of alerts; an empty one matches every alert."""

    firing: bool = False
    kind: str = ""
    run: str = ""
    """The id of a run."""
    owner: str = ""

    def but(self, **changes: Any) -> AlertFilter:
        return replace(self, **changes)

    def condition(self) -> Q:
        wanted = Q(closed_at__isnull=True) if self.firing else Q()
        names = {"kind": self.kind, "run_id": self.run, "run__owner__username": self.owner}
        return wanted & Q(**{column: value for column, value in names.items() if value})


def alerts_for(user: AbstractBaseUser | AnonymousUser) -> QuerySet[Alert]:
    """The alerts that a user can view: of every run."""
    return Alert.objects.all() if can_view(user) else Alert.objects.none()


def page(
    user: AbstractBaseUser | AnonymousUser,
    chosen: AlertFilter,
    *,
    before: str = "",
    limit: int = PAGE,
) -> tuple[list[dict[str, Any]], str]:
    """Rows of one page, the newest first, and the position of the next ('' on the last).

    A ``before`` that is no position selects the first page. Two queries.
    """
    alerts = alerts_for(user).filter(chosen.condition())
    alerts = alerts.select_related("run__owner", "replica", "acknowledged_by")
    found, after = keyset.page(alerts, "opened_at", before=before, limit=limit)
    read_at = read_until(user)
    return [_row(alert, read_at) for alert in found], after


def _row(alert: Alert, read_at: datetime | None) -> dict[str, Any]:
    run = alert.run
    return row_of(
        frame_rows.InboxAlert,
        alert,
        title=KINDS.get(alert.kind, alert.kind),
        run=str(run.pk) if run else None,
        run_name=run.name if run else None,
        owner=run.owner.get_username() if run else None,
        replica=alert.replica.number if alert.replica else None,
        acknowledged_by=alert.acknowledged_by and alert.acknowledged_by.get_username(),
        unread=_is_unread(alert, read_at),
    )


def _is_unread(alert: Alert, read_at: datetime | None) -> bool:
    is_new = read_at is None or alert.opened_at > read_at
    return is_new and alert.acknowledged_at is None


def read_until(user: AbstractBaseUser | AnonymousUser) -> datetime | None:
    """Until when a user has read the alerts; at first until the account was created."""
    if not isinstance(user, User):
        return None
    read = AlertsRead.objects.filter(user=user).values_list("read_at", flat=True).first()
    return read or user.date_joined


def unread(user: AbstractBaseUser | AnonymousUser) -> int:
    """Unread alerts of a user, at most :data:`MOST_UNREAD`; 0 without a role."""
    return unread_count(user) if isinstance(user, User) and can_view(user) else 0


def unread_count(user: User) -> int:
    """:func:`unread` for a user who has a role. One query, of every page: it is written in SQL,
    because building and compiling it takes several times longer than to execute it."""
    with connection.cursor() as cursor:
        cursor.execute(_UNREAD, [user.pk, user.pk, MOST_UNREAD])
        return int(cursor.fetchone()[0])


_UNREAD = """
SELECT COUNT(*) FROM (
    SELECT 1 FROM runs_alert WHERE acknowledged_at IS NULL AND opened_at > COALESCE(
        (SELECT read_at FROM runs_alertsread WHERE user_id = %s),
        (SELECT date_joined FROM auth_user WHERE id = %s)
    ) LIMIT %s
) AS unread
"""


def counts(user: AbstractBaseUser | AnonymousUser, chosen: AlertFilter) -> dict[str, Any]:
    """Numbers of the page: alerts that fire, and the kinds that fire under the other filters."""
    firing = alerts_for(user).filter(chosen.but(firing=True, kind="").condition())
    kinds = Counter(firing.order_by().values_list("kind", flat=True)[:10_000])
    return {
        "firing": sum(kinds.values()),
        "kinds": [
            {"kind": kind, "title": KINDS.get(kind, kind), "count": number}
            for kind, number in sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
        ],
    }
