"""Mark alerts as read. Every user with a role reads alerts for themselves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.contrib.auth.models import User
from django.utils import timezone

from runs.models import AlertsRead

RESOLUTION = timedelta(milliseconds=1)
"""Times of pages and API are cut off after milliseconds."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
AHEAD = timedelta(seconds=5)
"""A browser cannot mark alerts as read that open later."""


def mark_read(user: User, *, until: datetime | None = None) -> bool:
    """Mark all alerts that opened until then as read, by default until now. False if they were.

    ``until`` is the newest alert that the user has seen, so that one that opens meanwhile stays
    unread.
    """
    now = timezone.now()
    at = min(max(until, EPOCH), now + AHEAD) + RESOLUTION if until else now
    row, created = AlertsRead.objects.get_or_create(user=user, defaults={"read_at": at})
    if created:
        return True
    return bool(AlertsRead.objects.filter(pk=row.pk, read_at__lt=at).update(read_at=at))
