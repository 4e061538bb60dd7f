"""Format numbers for people. ``static/js/lib/format.js`` is the same in the browser: a browser test
compares both, so that no figure changes when the live stream takes over.

An unknown value is an en dash, never 0. No formatter raises.
"""

from __future__ import annotations

import datetime
import math
from decimal import ROUND_HALF_UP, Context, Decimal

UNKNOWN = "–"
HUGE = 1e18
"""Larger numbers are written with an exponent: ``-1.70e+308``. No real figure is that large, but a
column can hold one."""
_DIGITS = Context(prec=800, rounding=ROUND_HALF_UP)
"""Enough to represent every float exactly: the smallest has 767 digits."""
_PLACES = tuple(Decimal(1).scaleb(-digits) for digits in range(4))
_THREE = Context(prec=3, rounding=ROUND_HALF_UP)


def count(value: float | None) -> str:
    """``1,234``; above ten thousand three significant digits: ``12.3k``, ``4.56M``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) < 10_000:
        return f"{_fixed(value, 0):,}"
    if abs(value) >= HUGE:
        return _exponent(value)
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{_three(value / size)}{suffix}"
    return f"{_fixed(value, 0):,}"


def size(value: float | None) -> str:
    """Bytes in decimal units: ``1.23 MB``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= HUGE:
        return f"{_exponent(value)} B"
    for unit, suffix in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= unit * 0.9995:
            return f"{_three(value / unit)} {suffix}"
    return f"{_fixed(value, 0)} B"


def loss(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞"
    return str(_fixed(value, 3)) if abs(value) < 100 else count(value)


def duration(value: float | None) -> str:
    """Seconds as ``31 ms``, ``0.25 s``, ``45 s``, ``3m 20s``, ``2h 05m``, ``3d 04h``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value < 0:
        value = 0
    if value >= HUGE:
        return f"{_exponent(value)} s"
    if value < 0.0995:
        return f"{_fixed(value * 1000, 0)} ms"
    if value < 9.95:
        return f"{_fixed(value, 2 if value < 0.995 else 1)} s"
    whole = math.floor(value + 0.5)
    if whole < 60:
        return f"{whole} s"
    minutes, seconds = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {seconds:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}h"


def elapsed(value: float | None) -> str:
    """Whole seconds: ``0 s``, ``45 s``, ``3m 20s``, ``2h 05m``, ``3d 04h``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    whole = max(0, math.floor(value))
    return f"{whole} s" if whole < 60 else duration(whole)


def ago(value: float) -> str:
    """``just now``, ``12 s ago``, ``5 min ago``."""
    return "just now" if value < 2 else f"{age(value)} ago"


def age(value: float | None) -> str:
    """Coarse age: ``now``, ``12 s``, ``5 min``, ``3 h``, ``2 d``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value < 2:
        return "now"
    if value >= HUGE:
        return f"{_exponent(value)} s"
    for unit, suffix in ((86_400, "d"), (3600, "h"), (60, "min")):
        if value >= unit:
            return f"{math.floor(value / unit)} {suffix}"
    return f"{math.floor(value)} s"


def instant(at: datetime.datetime) -> str:
    """``2026-11-23 16:45:51 UTC``."""
    try:
        at = at.astimezone(datetime.UTC)
    except OverflowError:  # within a day of the first or last year
        return at.isoformat()
    return f"{at.isoformat(' ', 'seconds').removesuffix('+00:00')} UTC"


def clock(at: datetime.datetime, *, now: datetime.datetime) -> str:
    """``16:45:51`` if that is today, else ``Nov 23, 16:45``; both in UTC. The browser uses its own
    zone and language instead."""
    at, now = at.astimezone(datetime.UTC), now.astimezone(datetime.UTC)
    return f"{at:%H:%M:%S}" if at.date() == now.date() else f"{at:%b} {at.day}, {at:%H:%M}"


def percent(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= HUGE:
        return f"{_exponent(value)} x"
    return f"{_fixed(value * 100, 1)}%" if abs(value) < 0.0995 else f"{_fixed(value * 100, 0)}%"


def money(value: float | None) -> str:
    """US dollars: ``$0.00``, ``<$0.01``, ``$12.34``, ``$1,234``, ``$56.7k``; ``unknown`` for None,
    because a dash could be read as zero."""
    if value is None or not math.isfinite(value):
        return "unknown"
    if 0 < value < 0.005:
        return "<$0.01"
    if abs(value) < 999.995:
        return f"${_fixed(value, 2)}"
    return f"${count(value)}"


def spent(value: float | None, known: bool = True) -> str:
    """A sum of money. ``+`` marks one without the jobs whose price is unknown: ``$12.34 +``."""
    if known:
        return money(value)
    return f"{money(value)} +" if value else "unknown"


def lower_bound(value: float, known: bool = True) -> str:
    """A count. ``+`` marks one without the unknown parts: ``12 +``; ``unknown`` if all are."""
    if known:
        return count(value)
    return f"{count(value)} +" if value else "unknown"


def rate(usd_h: float | None, known: bool = True) -> str:
    """Dollars an hour of the running jobs; a dash if there are none."""
    return UNKNOWN if known and not usd_h else spent(usd_h, known)


def exact(value: object) -> str:
    """A setting with all its digits and no more."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _three(value: float) -> str:
    magnitude = abs(value)
    if magnitude < 9.995:
        return str(_fixed(value, 2))
    return str(_fixed(value, 1)) if magnitude < 99.95 else str(_fixed(value, 0))


def _fixed(value: float, digits: int) -> Decimal:
    """Round like ``toFixed`` of the browser: exactly, halves away from zero."""
    return Decimal(value).quantize(_PLACES[digits], context=_DIGITS)


def _exponent(value: float) -> str:
    """Like ``toExponential(2)`` of the browser: ``1.25e+20``."""
    return f"{_THREE.create_decimal(value):.2e}"


def in_short(reason: str) -> str:
    """The reason of a failure with only the last line of the log that it quotes: the error."""
    head, _, log = reason.partition(" Last lines of its log:")
    last = log.strip().rpartition("\n")[2].strip()
    return f"{head} {last}" if last else reason
