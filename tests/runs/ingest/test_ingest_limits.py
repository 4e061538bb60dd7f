"""Limits of telemetry: sizes, rounds and times. Sums fit their columns."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from diloco.protocol import keys, telemetry
from runs.ingest.leases import MAX_INCARNATIONS, read_leases
from runs.ingest.limits import INT_LIMIT, SECONDS_LIMIT
from runs.metrics import charts
from runs.models import Event, LogLine, Run
from tests.runs.ingest_harness import IngestHarness
from tests.runs.run_harness import incarnation

pytestmark = pytest.mark.django_db


def put(ingest: IngestHarness, n: int = 1, **changes: Any) -> None:
    """Write segment ``n`` of replica 0 with changed fields."""
    body = json.loads(ingest.bucket.segment(0, n, losses=[5.0], first=n))
    ingest.bucket.store.put(
        keys.telemetry(0, incarnation(0), n), json.dumps({**body, **changes}).encode()
    )


def report(ingest: IngestHarness, **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = vars(ingest.bucket.report(1, **more))
    return result


def test_huge_durations_do_not_overflow_a_sum(ingest: IngestHarness) -> None:
    put(ingest, rounds=[report(ingest, phases={"compute": 1e308})] * 2)
    ingest.ingest()
    assert ingest.cursor().next_n == 2
    assert ingest.run.phase_s == {"compute": 2 * SECONDS_LIMIT}


def test_huge_byte_counts_do_not_overflow_a_sum(ingest: IngestHarness) -> None:
    for n in (1, 2):
        put(ingest, n, rounds=[report(ingest, bytes_up=2**53)] * 900)
        ingest.ingest()
    assert ingest.run.bytes_up == INT_LIMIT
    assert ingest.run.bytes_down == 2 * 900 * 300


@pytest.mark.parametrize(
    ("name", "limit", "row"),
    [
        ("logs", telemetry.MAX_LOGS, {"wall_s": 1.0, "level": "", "message": ""}),
        (
            "evaluations",
            telemetry.MAX_EVALUATIONS,
            {"round": 1, "loss": 1.0, "tokens": 0, "wall_s": 1},
        ),
    ],
)
def test_too_many_rows_are_refused_with_the_field_name(
    ingest: IngestHarness, name: str, limit: int, row: dict[str, Any]
) -> None:
    put(ingest, 1, **{name: [row] * (limit + 1)})
    put(ingest, 2, **{name: [row] * limit})
    ingest.ingest()
    [event] = Event.objects.filter(kind="refused")
    assert f"{name}: expected at most {limit}, found {limit + 1}" in event.message
    assert ingest.loss() == [5.0]


def test_a_flood_of_empty_lines_is_refused_before_parsing_lines(
    ingest: IngestHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = b'{"wall_s":1,"level":"","message":""},'
    body = json.loads(ingest.bucket.segment(0, 1))
    head = json.dumps({**body, "logs": []}).encode().replace(b'"logs": []', b'"logs": [%s]')
    ingest.bucket.store.put(keys.telemetry(0, incarnation(0), 1), head % (line * 100_000)[:-1])
    monkeypatch.setattr("diloco.protocol.parsing.json", None)  # the object is not parsed
    ingest.ingest()
    monkeypatch.undo()
    [event] = Event.objects.filter(kind="refused")
    assert "objects and lists" in event.message
    assert not LogLine.objects.exists()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"evaluations": [{"round": 2**31 - 1, "loss": 1.0, "tokens": 0, "wall_s": 1.0}]}, "round"),
        ({"evaluations": [{"round": 60, "loss": 1.0, "tokens": 0, "wall_s": 1e12}]}, "wall_s"),
        ({"evaluations": [{"round": 66, "loss": 1.0, "tokens": 0, "wall_s": 1.0}]}, "round"),
        ({"rounds": [{"round": 2**31 - 1}]}, "rounds.round"),
        ({"rounds": [{"step": 10**9}]}, "rounds.step"),
        ({"rounds": [{"phases": {str(n): 1.0 for n in range(99)}}]}, "rounds.phases"),
        ({"steps": {"step": [10**9], "round": [1], "wall_s": [1.0], "tokens": [1]}}, "steps.step"),
        ({"steps": {"step": [1], "round": [10**6], "wall_s": [1.0], "tokens": [1]}}, "steps.round"),
        ({"steps": {"step": [1], "round": [1], "wall_s": [-1.0], "tokens": [1]}}, "steps.wall_s"),
        ({"system": {str(n): 1.0 for n in range(99)}}, "system"),
    ],
)
def test_values_outside_the_run_are_refused_with_the_field_name(
    ingest: IngestHarness, changes: dict[str, Any], field: str
) -> None:
    if "rounds" in changes:
        changes = {"rounds": [{**report(ingest), **changes["rounds"][0]}]}
    put(ingest, 1, **changes)
    ingest.ingest()
    [event] = Event.objects.filter(kind="refused")
    assert field in event.message
    assert ingest.run.eval_loss is None


def test_an_evaluation_far_ahead_is_accepted_if_its_round_is_committed(
    ingest: IngestHarness,
) -> None:
    Run.objects.update(
        next_round=2, group_settings={**ingest.run.group_settings, "total_rounds": 900}
    )
    evaluation = {"round": 500, "loss": 1.0, "tokens": 0, "wall_s": 1.0}
    put(ingest, 1, evaluations=[evaluation])
    ingest.ingest()
    assert Event.objects.filter(kind="refused").count() == 1
    ingest.bucket.commit(500, (0,))
    put(ingest, 2, evaluations=[evaluation])
    ingest.ingest()
    assert ingest.run.rounds.get(number=500).eval_loss == 1.0
    assert ingest.run.eval_loss is None  # until the commit is ingested


def test_a_later_evaluation_is_shown_once_its_round_is_committed(make_harness: Any) -> None:
    harness = make_harness(replicas=1)
    harness.start()
    evaluation = harness.bucket.evaluation
    harness.bucket.segment(0, 1, evaluations=(evaluation(1, 4.0), evaluation(3, 1.0)))
    harness.bucket.commit(1, (0,))
    harness.tick()
    assert (harness.run.eval_round, harness.run.eval_loss) == (1, 4.0)
    harness.bucket.segment(0, 2, evaluations=(evaluation(2, 3.0),))
    harness.bucket.commit(2, (0,))
    harness.tick()
    assert (harness.run.eval_round, harness.run.eval_loss) == (2, 3.0)
    harness.bucket.commit(3, (0,))
    harness.tick()
    assert (harness.run.eval_round, harness.run.eval_loss) == (3, 1.0)


def test_values_that_no_sum_can_hold_are_infinite(ingest: IngestHarness) -> None:
    ingest.bucket.segment(0, 1, losses=[1e308, -1.7e308, 3.0])
    ingest.ingest()
    whole = charts.Window(max_points=100)
    [curve] = charts.read(ingest.run, [("loss", 0)], whole)
    assert curve.points.value.tolist() == [math.inf, -math.inf, 3.0]
    assert ingest.run.replicas.get(number=0).loss == 3.0
    assert Event.objects.filter(kind="nonfinite").count() == 1


def test_only_the_newest_of_many_incarnations_are_read(ingest: IngestHarness) -> None:
    for seq in range(1, MAX_INCARNATIONS + 10):
        ingest.bucket.beat(0, 1, seq=seq)
    leases = read_leases(ingest.bucket.store)
    assert len(leases.incarnations) == MAX_INCARNATIONS
    assert leases.crowded == {0: MAX_INCARNATIONS + 9}
    assert leases.incarnations[-1] == (0, incarnation(0, MAX_INCARNATIONS + 9))


def test_a_batch_ends_with_the_bytes_of_a_tick(
    ingest: IngestHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(1, 6):
        ingest.bucket.segment(0, n, losses=[5.0], first=n)
    monkeypatch.setattr("runs.ingest.telemetry.BYTES_PER_TICK", 1)
    ingest.ingest()
    assert ingest.cursor().next_n == 2
