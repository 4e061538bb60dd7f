"""Summaries of rounds agree with the contributions, and are small."""

from __future__ import annotations

import json

import pytest

from runs.models import Contribution, Round, Run
from runs.queries import round_summaries, selectors
from runs.queries.round_summaries import summaries
from tests.browser import seed, seed_rounds

pytestmark = pytest.mark.django_db


@pytest.fixture
def run() -> Run:
    run: Run = seed.run(seed.user("olga", "operator"), replicas=4, committed=12)
    seed_rounds.late_and_healing(run)
    return run


def test_summaries_agree_with_the_contributions(run: Run) -> None:
    names = round_summaries.OUTCOMES
    whole = {row["number"]: row for row in selectors.round_rows(run)}
    rows = summaries(run, replicas=4)
    assert [row["number"] for row in rows] == sorted(whole)
    for row in rows:
        expected = whole[row["number"]]
        states = {n: names[int(digit)] for n, digit in enumerate(row["outcomes"])}
        for one in expected["contributions"]:
            assert states[one["replica"]] == one["state"]
            if one["late_s"]:
                assert row["late"][str(one["replica"])] == pytest.approx(one["late_s"], abs=0.06)
            if one["state"] in ("late", "refused") and one["reason"]:
                assert row["reasons"][str(one["replica"])] == one["reason"]
        assert [n for n, state in states.items() if state == "healing"] == expected["healing"]
        moved = sum(one["bytes_up"] + one["bytes_down"] for one in expected["contributions"])
        assert row["bytes"] == moved
        opened = [one["started_at"] for one in expected["contributions"] if one["started_at"]]
        assert row["opened_at"] == (min(opened) if opened else None)
    assert any("late" in {names[int(d)] for d in row["outcomes"]} for row in rows)


def test_the_straggler_waited_least(run: Run) -> None:
    row = selectors.round_rows(run, numbers=[4])[0]
    waits = sorted(
        (one["phases"].get("wait", 0), one["replica"])
        for one in row["contributions"]
        if one["state"] == "included"
    )
    [summary] = summaries(run, numbers=[4])
    assert summary["straggler"] == waits[0][1]
    assert summary["lag_s"] == pytest.approx(waits[len(waits) // 2][0] - waits[0][0], abs=0.01)


def test_many_replicas_have_fewer_rounds(run: Run) -> None:
    limit = round_summaries.MOST_OUTCOMES // 3
    assert [row["number"] for row in summaries(run, replicas=limit)] == [11, 12, 13]
    assert [row["number"] for row in summaries(run, replicas=limit, before=11)] == [8, 9, 10]
    assert len(summaries(run, replicas=10**9)) == 1


def test_a_hostile_round_has_a_summary(run: Run) -> None:
    """Replicas write clocks, norms and reasons."""
    row = Round.objects.filter(run=run).order_by("number")[2]
    one = Contribution.objects.filter(round=row).order_by("replica__number")[0]
    _, timings = round_summaries.round_strips.unpack(bytes(row.outcomes), bytes(row.timings), 4)
    timings["started"][0], timings["norm"][0] = 1e300, float("inf")
    row.timings = timings.tobytes()
    row.save()
    one.state, one.reason = "refused", "x" * 100_000
    one.save()
    [summary] = summaries(run, numbers=[row.number])
    json.dumps(summary, allow_nan=False)
    assert max(map(len, summary["reasons"].values())) == round_summaries.REASON_CHARS
