"""Costs of many attempts at once are those of each attempt."""

from __future__ import annotations

import itertools
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from runs.models import ReplicaAttempt
from runs.queries import even_costs
from runs.queries.attempt_costs import COLUMNS, Attempt, Period, by_day, stretches
from runs.queries.even_costs import COSTLY, EvenCosts, Parts
from tests.browser import seed

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 11, 10, 12, 0, 0, 250_003, tzinfo=UTC)
MIDNIGHT = datetime(2026, 11, 8, tzinfo=UTC)
PERIOD = Period.until(NOW.date(), days=12)
STARTS = (
    None,
    MIDNIGHT - timedelta(hours=30),
    MIDNIGHT - timedelta(microseconds=1),
    MIDNIGHT,
    NOW - timedelta(microseconds=1_500_001),
)
ENDS = (None, MIDNIGHT, MIDNIGHT + timedelta(days=1), NOW - timedelta(hours=3))
PRICES = (None, 0.0, 2.0, -5.0, 1e-300, float("inf"), float("nan"))
COSTS = (None, 0.0, 7.5, 1e300, -1.0, float("inf"))
EARLIER = (0.0, -1.0, 3.0)


@pytest.fixture
def attempts() -> Any:
    """Attempts with all combinations of times, prices and costs."""
    run = seed.run(seed.user("olga", "operator"), replicas=1, committed=0)
    replica = run.replicas.get()
    created = MIDNIGHT - timedelta(days=2)
    ReplicaAttempt.objects.all().delete()
    ReplicaAttempt.objects.bulk_create(
        ReplicaAttempt(
            replica=replica,
            number=number,
            launch_key=str(number),
            created_at=created,
            launched_at=None if number % 2 else created + timedelta(hours=1),
            started_at=start,
            ended_at=end,
            price_usd_h=price,
            cost_usd=cost,
            earlier_cost_usd=earlier,
        )
        for number, (start, end, price, cost, earlier) in enumerate(
            itertools.product(STARTS, ENDS, PRICES, COSTS, EARLIER)
        )
    )
    return ReplicaAttempt.objects.all()


def test_the_costs_of_a_day_are_those_of_each_attempt(attempts: Any) -> None:
    expected: dict[date, dict[int, tuple[float, float]]] = defaultdict(dict)
    uneven = set()
    for pk, *values in attempts.values_list("pk", *COLUMNS):
        parts = stretches(Attempt(*values), NOW)
        if any(part.usd for part in parts) and values[4] > 0:
            uneven.add(pk)
            continue
        for stretch in parts:
            for day, share, s in by_day(stretch, PERIOD):
                usd = np.nan if stretch.usd is None else stretch.usd * share
                expected[day][pk] = usd, s
    every = EvenCosts.of(attempts.filter(COSTLY).values_list(*even_costs.COLUMNS), NOW)
    assert set(every.attempt[~every.is_even].tolist()) == uneven
    costs = every.only(every.is_even)
    assert len(expected) == 5
    for day in PERIOD.days:
        places, usd, s = costs.on(day)
        assert set(costs.attempt[places].tolist()) == set(expected[day])
        of_day = [expected[day][pk] for pk in costs.attempt[places].tolist()]
        np.testing.assert_allclose(usd, [usd for usd, _ in of_day], rtol=1e-9)
        np.testing.assert_allclose(s, [s for _, s in of_day], rtol=0, atol=1e-6)


def test_parts_are_summed_up_by_group() -> None:
    parts = Parts(4)
    parts.add(np.array([0, 2]), np.array([1.0, np.nan]), np.array([10.0, 20.0]))
    parts.add(np.array([0, 1]), np.array([2.0, 4.0]), np.array([10.0, 10.0]))
    first, second, third = parts.tallies(np.array([1, 0, 1, 2]), 3)
    assert (first.usd, first.jobs, first.unpriced_jobs) == (4.0, 1, 0)
    assert (second.usd, second.jobs, second.unpriced_jobs, second.unpriced_s) == (3.0, 2, 1, 20.0)
    assert third.jobs == 0
