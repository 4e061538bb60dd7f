"""Points as columns of JSON.

JSON has no NaN: a value that is not finite is null, and ``nonfinite`` lists
``[index, "nan" | "inf" | "-inf"]`` so that a page can mark it.
"""

from __future__ import annotations

import math
from typing import Any

from runs.metrics.blocks import Points


def columns(
    points: Points, *, series: str, replica: int | None, total: int | None = None
) -> dict[str, Any]:
    """All columns; ``total`` is how many points there were to choose from."""
    value = [float(v) for v in points.value]
    return {
        "series": series,
        "replica": replica,
        "step": points.step.tolist(),
        "round": points.round.tolist(),
        "tokens": points.tokens.tolist(),
        "wall_s": [round(w, 3) for w in points.wall_s.tolist()],
        "value": [v if math.isfinite(v) else None for v in value],
        "nonfinite": nonfinite(value),
        "total": len(points) if total is None else total,
    }


def nonfinite(value: list[float]) -> list[list[Any]]:
    return [
        [i, "nan" if math.isnan(v) else "inf" if v > 0 else "-inf"]
        for i, v in enumerate(value)
        if not math.isfinite(v)
    ]
