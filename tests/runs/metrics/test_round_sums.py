"""Sums over whole rounds give the cells that placing each phase in time gives."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from runs.metrics import round_strips, timeline
from runs.models import Round, Run
from tests.browser import seed

pytestmark = pytest.mark.django_db

ROUNDS, REPLICAS, TOOK_S = 400, 5, 10.0


@pytest.fixture
def run() -> Run:
    """Rounds of 10 s: 6 s of compute, and 4 s of upload (replica 0) or waiting (the others).
    Replica 4 leaves after half of them; replica 3 is always last to upload."""
    run: Run = seed.run(seed.user("olga", "operator"), committed=0, replicas=REPLICAS)
    run.first_step_at = run.created_at
    run.save()
    begun = run.created_at.timestamp()
    rows = []
    for number in range(1, ROUNDS + 1):
        outcome = np.full(REPLICAS, 2, dtype="u1")
        timing = np.zeros(REPLICAS, dtype=round_strips.TIMING)
        timing["started"] = begun + (number - 1) * TOOK_S
        timing["phases"] = [[6, 0, 4, 0, 0]] * REPLICAS
        timing["phases"][0] = [6, 4, 0, 0, 0]
        timing["phases"][3] = [10, 1, 0, 0, 0]
        if number > ROUNDS // 2:
            outcome[4], timing[4] = 0, 0
        rows.append(
            Round(
                run=run,
                number=number,
                state="committed",
                committed_at=datetime.fromtimestamp(begun + number * TOOK_S, UTC),
                outcomes=outcome.tobytes(),
                timings=timing.tobytes(),
            )
        )
    Round.objects.filter(run=run).delete()
    Round.objects.bulk_create(rows)
    return run


def whole(run: Run, columns: int = 200) -> Any:
    return timeline.timeline(run, low=None, high=None, columns=columns)


def test_cells_are_those_of_placed_phases(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    summed = whole(run)
    monkeypatch.setattr(timeline, "MAX_BARS", 0)
    monkeypatch.setattr(timeline, "_summed", lambda run, n, c, e: timeline._placed(run, n, e))
    placed = whole(run)
    assert summed.cells is not None
    assert summed.cells.shape == placed.cells.shape == (REPLICAS, 200)
    kinds = summed.cells >> 4
    assert (kinds == placed.cells >> 4).mean() > 0.99
    middle = summed.cells[:, 20:80]
    upload, wait = 1, 2
    assert (middle[0] >> 4 == upload).all()
    assert (middle[1] >> 4 == wait).all()
    assert ((middle[1] & 15) == round(0.4 * 15)).all()
    assert (summed.cells[4, 120:180] == timeline.BLANK).all()
    assert summed.slowest == (3, ROUNDS)
    assert summed.counted == placed.counted == ROUNDS


def test_a_long_round_is_placed_in_time(run: Run) -> None:
    """The replicas computed for an hour in the last round."""
    last = Round.objects.get(run=run, number=ROUNDS)
    assert last.committed_at is not None
    _, timing = round_strips.unpack(bytes(last.outcomes), bytes(last.timings), REPLICAS)
    timing["phases"][0] = [3600, 0, 0, 0, 0]
    last.timings = timing.tobytes()
    last.committed_at = datetime.fromtimestamp(float(timing["started"][0]) + 3600, UTC)
    last.save()
    cells = whole(run).cells
    assert cells is not None
    assert ((cells[0, 120:] & 15) == 0).all()
