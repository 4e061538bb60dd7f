"""The goodput of elastic learners agrees with the published table and with its own assumptions."""

from __future__ import annotations

import heapq
import random

import pytest

from bench.simulate_papers import (
    CHIPS,
    DOWNSCALE_S,
    GOODPUT,
    UPSCALE_S,
    YEAR_S,
    away_bounds,
    elastic_goodput,
)


def test_two_pauses_are_within_three_points_of_the_published_goodput() -> None:
    misses = [
        100 * elastic_goodput(learners * YEAR_S / chips) - value
        for learners, published in GOODPUT.items()
        for chips, value in zip(CHIPS, published, strict=True)
    ]
    assert len(misses) == 25
    assert max(map(abs, misses)) <= 3.0


def test_no_single_pause_is_within_three_points() -> None:
    least, most = away_bounds(3.0)
    assert least > most
    least, most = away_bounds(4.4)
    assert least < 22.7 < most


@pytest.mark.parametrize("mtbf_s", [20.0, 200.0])
def test_the_goodput_is_that_of_simulated_failures_and_returns(mtbf_s: float) -> None:
    draw = random.Random(0)
    now_s = trained_s = 0.0
    returns: list[float] = []
    for _ in range(4000):
        fails_s = now_s + draw.expovariate(1 / mtbf_s)
        while returns and returns[0] < fails_s:
            back_s = heapq.heappop(returns)
            if back_s > now_s:  # else its chips came back during a pause
                trained_s += back_s - now_s
                now_s = back_s + UPSCALE_S
                fails_s += UPSCALE_S
        trained_s += fails_s - now_s
        heapq.heappush(returns, fails_s + draw.expovariate(1 / 600))
        now_s = fails_s + DOWNSCALE_S
    assert trained_s / now_s == pytest.approx(elastic_goodput(mtbf_s), abs=0.02)
