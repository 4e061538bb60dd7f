"""Round strips match the table of contributions, and give the curves by round."""

from __future__ import annotations

import datetime
import math
from typing import Any

import numpy as np
import pytest

from runs.metrics import charts, round_strips
from runs.models import Contribution, MetricBlock, Round, Run
from tests.browser import seed
from tests.runs.ingest_harness import IngestHarness


def facts(run: Run) -> dict[int, tuple[bytes, bytes]]:
    return {r.number: (bytes(r.outcomes), bytes(r.timings)) for r in Round.objects.filter(run=run)}


def blocks(run: Run) -> dict[Any, bytes]:
    rows = MetricBlock.objects.filter(run=run)
    return {(b.replica_id, b.series, b.level, b.index): bytes(b.data) for b in rows}


@pytest.fixture
def run(db: Any) -> Run:
    made: Run = seed.run(seed.user("olga", "operator"), committed=12, replicas=4, sync_every=60)
    return made


def test_strip_matches_the_table(run: Run) -> None:
    for row in Round.objects.filter(run=run):
        outcomes, timings = round_strips.unpack(bytes(row.outcomes), bytes(row.timings), 4)
        given = {c.replica.number: c for c in row.contributions.select_related("replica")}
        for number in range(4):
            one = given.get(number)
            assert round_strips.OUTCOMES[outcomes[number]] == (one.state if one else "")
            if one is None:
                assert timings[number] == np.zeros(1, dtype=round_strips.TIMING)[0]
                continue
            assert one.started_at is not None
            assert timings[number]["started"] == one.started_at.timestamp()
            assert timings[number]["norm"] == one.norm
            assert timings[number]["phases"].sum() == pytest.approx(sum(one.phases.values()))


def test_ingest_writes_the_same_strip_as_a_rebuild(ingest: IngestHarness) -> None:
    ingest.bucket.segment(
        0, 1, rounds=[ingest.bucket.report(1, phases={"compute": 3.0, "wait": 1.0})]
    )
    ingest.bucket.segment(1, 1, rounds=[ingest.bucket.report(1, outcome="late")])
    changes = ingest.ingest()
    row = Round.objects.get(run=ingest.run, number=1)
    before = bytes(row.outcomes), bytes(row.timings)
    assert [round_strips.OUTCOMES[o] for o in before[0]] == ["included", "late"]
    again = round_strips.rebuild(row)
    assert (bytes(again.outcomes), bytes(again.timings)) == before
    named = {name for name, owner, _ in changes.points if owner is None}
    assert {"norm", "norm_low", "norm_high", "update_norm", "phase_compute"} <= named


def test_curves_are_means_of_included_contributions(run: Run) -> None:
    rows = Contribution.objects.filter(round__run=run, round__number=9, state="included")
    norms = [c.norm for c in rows if c.norm]
    whole = charts.Window(max_points=100)
    names = [(name, None) for name in ("norm", "norm_low", "norm_high", "phase_wait")]
    result = {c.series: c.points for c in charts.read(run, names, whole)}

    def at(series: str, number: int) -> float:
        points = result[series]
        return float(points.value[points.round == number][0])

    assert at("norm", 9) == pytest.approx(math.fsum(norms) / len(norms))
    assert (at("norm_low", 9), at("norm_high", 9)) == (min(norms), max(norms))
    assert 5 not in result["norm"].round.tolist()  # void
    waits = Contribution.objects.filter(round__run=run, round__number=9)
    mean = sum(c.phases["wait"] for c in waits) / len(waits)
    assert at("phase_wait", 9) == pytest.approx(mean)


def test_extreme_reported_values_fit_the_strip() -> None:
    row = Round(number=1)
    huge = Contribution(state="included", phases={"wait": 1e300}, norm=1e300)
    round_strips.put(row, [(3, huge)])
    outcomes, timings = round_strips.unpack(bytes(row.outcomes), bytes(row.timings), 5)
    assert outcomes.tolist() == [0, 0, 0, 2, 0]
    assert np.isfinite(timings["phases"]).all()
    assert timings["norm"][3] == 1e300


PLANNED = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"uploaded_at": 2.4}, 2.4),
        ({"uploaded_at": -0.5}, None),  # included in the plan of a void round
        ({"uploaded_at": 2.4, "state": "included"}, None),
        ({"started_at": -9.0, "phases": {"compute": 9.5, "upload": 1.0, "wait": 7.0}}, 1.5),
        ({"started_at": -9.0, "phases": {"compute": 9.5}}, None),  # the upload time is unknown
        ({"started_at": -9.0, "phases": {"compute": 1e300, "upload": 1.0}}, None),
        ({}, None),
    ],
)
def test_lateness_is_from_the_plan_to_the_upload(
    given: dict[str, Any], expected: float | None
) -> None:
    row = Round(number=1, planned_at=PLANNED, committed_at=PLANNED + datetime.timedelta(seconds=1))
    times = {
        name: PLANNED + datetime.timedelta(seconds=given.pop(name))
        for name in ("uploaded_at", "started_at")
        if name in given
    }
    one = Contribution(**({"state": "late"} | given | times))
    assert round_strips.late_s(row, one) == expected
    round_strips.put(row, [(7, one)])
    result = round_strips.latenesses(row.lateness)
    assert result == ({} if expected is None else {7: pytest.approx(expected)})
    round_strips.put(row, [(7, Contribution(state="included"))])
    assert round_strips.latenesses(row.lateness) == {}


def test_lateness_without_a_plan_is_from_the_commit() -> None:
    row = Round(number=1, committed_at=PLANNED)
    one = Contribution(state="late", uploaded_at=PLANNED + datetime.timedelta(seconds=3))
    assert round_strips.late_s(row, one) == 3.0
    assert round_strips.late_s(Round(number=1), one) is None


def test_cosines_do_not_depend_on_when_another_replica_was_marked_as_healing() -> None:
    """Servers that have read the same bucket in another order have the same bytes."""
    contribution = Contribution(state="included", cosine=0.5)
    before, after = Round(number=1), Round(number=1)
    round_strips.heal(before, [1])
    round_strips.put(before, [(0, contribution)])
    round_strips.put(after, [(0, contribution)])
    round_strips.heal(after, [1])
    assert bytes(before.outcomes) == bytes(after.outcomes)
    assert bytes(before.cosines) == bytes(after.cosines)
    assert round_strips.cosines(bytes(after.cosines), 2).tolist() == [0.5, 0.0]
