"""The component for times. ``static/js/lib/times.js`` keeps its text current and changes the title,
which shows on hover and focus, to the zone of the browser.

A time is a datetime or text in ISO 8601; other text is an unknown time.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.safestring import SafeString

from dashboard.presentation import formats
from dashboard.presentation.markup import fill

Time = str | datetime.datetime | None


def age(value: Time) -> str:
    moment = parse_datetime(value) if isinstance(value, str) else value
    return formats.age((timezone.now() - moment).total_seconds() if moment else None)


def moment(value: Time) -> SafeString:
    """A relative time, such as ``5 min``."""
    return _component(value, "age", age)


def clock(value: Time) -> SafeString:
    """An absolute time."""
    return _component(value, "clock", formats.instant)


def left(value: Time) -> SafeString:
    """The time left until a deadline; without JavaScript the deadline."""
    return _component(value, "left", formats.instant)


def _component(value: Time, form: str, text: Callable[[datetime.datetime], str]) -> SafeString:
    try:
        at = parse_datetime(value) if isinstance(value, str) else value
    except ValueError:  # well formatted, but no date
        at = None
    if at is None:
        return SafeString(formats.UNKNOWN)
    return fill(
        '<time datetime="{}" data-{} title="{}" tabindex="0">{}</time>',
        at.isoformat(),
        form,
        formats.instant(at),
        text(at),
    )
