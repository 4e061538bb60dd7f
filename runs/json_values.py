"""Values as JSON takes them: times are ISO 8601 in UTC, and what is not finite is null."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any


def iso(at: datetime | None) -> str | None:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z") if at else None


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def mapping(value: Any) -> Mapping[str, Any]:
    """A column of JSON that should hold an object; {} where it holds something else."""
    return value if isinstance(value, Mapping) else {}


def texts(value: Any) -> list[str]:
    """A column of JSON that should hold a list of texts; without what is none."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
