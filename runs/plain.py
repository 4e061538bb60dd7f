"""Values as JSON takes them: times are ISO 8601 in UTC, and what is not finite is null."""

from __future__ import annotations

import math
from datetime import datetime


def iso(at: datetime | None) -> str | None:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z") if at else None


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
