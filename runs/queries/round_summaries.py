"""Rows of rounds for the run page: what a list, a heatmap and a live update show of a round.

A round of 256 replicas has 256 contributions of 400 bytes. A summary has one digit for each replica
and a few figures, so a snapshot holds a hundred rounds. The page requests the contributions of a
round (:func:`runs.queries.selectors.round_rows`) only when the round is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from django.db.models import Sum
from numpy.typing import NDArray

from runs.json_values import finite, iso, row_of
from runs.metrics import round_strips
from runs.metrics.round_strips import GROUPS, OUTCOMES
from runs.models import Contribution, Round, Run
from runs.states import ContributionState

MOST_ROUNDS = 200
MOST_OUTCOMES = 24_000
"""Replicas times rounds in one response."""
MOST_CHANGED = 2000
"""Rounds in one delta: many change when a backlog is ingested."""
REASONS = 200
"""Contributions whose reason is included, the newest."""
REASON_CHARS = 300

_INCLUDED = OUTCOMES.index("included")
_COMPUTE, _WAIT = list(GROUPS).index("compute"), list(GROUPS).index("wait")


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """A round without its contributions.

    Attributes:
        outcomes: a digit for each replica number, an index into
            :data:`runs.metrics.round_strips.OUTCOMES`.
        late: seconds by the number of the late replica, where known.
        reasons: why contributions were late or refused, by replica number.
        opened_at: when the first replica began the round, by its own clock.
        straggler: of the included replicas, the one that waited least for the others.
        lag_s: by how much longer the median replica waited.
        norm: mean norm of the included pseudo-gradients.
        bytes: bytes up and down of all contributions; 0 until telemetry reports them.
    """

    number: int
    fragment: int
    state: str
    reason: str
    contributors: int
    mode: str
    committed_at: str | None
    loss: float | None
    eval_loss: float | None
    tokens_total: int
    digest_mismatch: bool
    outcomes: str
    late: dict[str, float]
    reasons: dict[str, str]
    opened_at: str | None
    straggler: int | None
    lag_s: float | None
    norm: float | None
    bytes: int


def summaries(
    run: Run,
    *,
    numbers: Iterable[int] | None = None,
    before: int | None = None,
    replicas: int = 1,
    most: int = MOST_ROUNDS,
) -> list[dict[str, Any]]:
    """Summaries of rounds, oldest first. Three queries.

    Args:
        numbers: only these rounds.
        before: only the newest rounds below this number.
        replicas: number of replicas of the run, which limits the number of rounds.
        most: only this many of the newest rounds.
    """
    rounds = Round.objects.filter(run=run)
    limit = max(min(most, MOST_OUTCOMES // max(replicas, 1)), 1)
    if before is not None:
        rounds = rounds.filter(number__lt=before)
    if numbers is not None:
        numbers = list(numbers)
        rounds = rounds.filter(number__in=numbers)
        limit = min(len(numbers), MOST_CHANGED)
    rows = list(rounds.order_by("-number")[:limit])[::-1]
    traffic, reasons = _traffic(rows), _reasons(rows)
    return [_summary(row, traffic.get(row.pk, 0), reasons.get(row.pk, {})) for row in rows]


def _summary(row: Round, traffic: int, reasons: dict[str, str]) -> dict[str, Any]:
    size = len(row.outcomes)
    outcomes, timings = round_strips.unpack(bytes(row.outcomes), bytes(row.timings), size)
    included = outcomes == _INCLUDED
    norms = timings["norm"][included & (timings["norm"] > 0)]
    started = timings["started"][timings["started"] > 0]
    straggler, lag_s = _straggler(included, timings["phases"])
    return row_of(
        RoundSummary,
        row,
        outcomes=(outcomes + ord("0")).tobytes().decode("ascii"),
        late={
            str(number): round(seconds, 1)
            for number, seconds in round_strips.latenesses(bytes(row.lateness)).items()
        },
        reasons=reasons,
        opened_at=_time(float(started.min())) if len(started) else None,
        straggler=straggler,
        lag_s=lag_s,
        norm=finite(float(f"{norms.mean():.6g}")) if len(norms) else None,
        bytes=traffic,
    )


def _straggler(
    included: NDArray[np.bool_], phases: NDArray[Any]
) -> tuple[int | None, float | None]:
    """(replica, lag in seconds). Each replica's own clock measured its waiting, so no two clocks
    are compared."""
    known = np.flatnonzero(included & (phases[:, _COMPUTE] > 0))
    if len(known) < 2:
        return None, None
    waits = phases[known, _WAIT].astype(float)
    least = int(waits.argmin())
    median = float(np.sort(waits)[len(waits) // 2])
    return int(known[least]), finite(round(median - waits[least], 3))


def _time(seconds: float) -> str | None:
    try:
        return iso(datetime.fromtimestamp(seconds, UTC))
    except (ValueError, OverflowError, OSError):  # a replica's clock can be anything
        return None


def _traffic(rows: Sequence[Round]) -> dict[int, int]:
    """Bytes of the contributions by the key of their round."""
    sums = (
        Contribution.objects.filter(round__in=rows)
        .order_by()
        .values_list("round_id")
        .annotate(up=Sum("bytes_up"), down=Sum("bytes_down"))
    )
    return {key: int((up or 0) + (down or 0)) for key, up, down in sums}


def _reasons(rows: Sequence[Round]) -> dict[int, dict[str, str]]:
    """Why contributions were not included, by the key of their round and by replica number."""
    states = (ContributionState.REFUSED, ContributionState.LATE)
    refused = Contribution.objects.filter(round__in=rows, state__in=states).exclude(reason="")
    found: dict[int, dict[str, str]] = {}
    columns = ("round_id", "replica__number", "reason")
    for key, number, reason in refused.order_by("-round_id").values_list(*columns)[:REASONS]:
        found.setdefault(key, {})[str(number)] = reason[:REASON_CHARS]
    return found
