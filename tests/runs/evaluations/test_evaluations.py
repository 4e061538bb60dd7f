"""Evaluations of checkpoints: queued once, one result."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.protocol.evaluation import EvaluationMetric
from runs.actions import evaluations
from runs.exceptions import ActionRefused
from runs.models import Evaluation, EvaluationAttempt
from tests.runs.evaluations.evaluation_harness import Evaluations


def test_a_checkpoint_is_evaluated_and_drawn_once(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    entrypoint, arguments = harness.executor.args[harness.key()]
    assert entrypoint == "diloco.evaluate"
    assert arguments["args"][:3] == [harness.run.rendezvous, "--round", "5"]
    harness.tick()
    assert harness.states() == {5: "running"}
    harness.write(5, 2.5)
    harness.end()
    for _ in range(3):
        harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.metrics) == (
        "succeeded",
        {"loss": [2.5, 0.1], "perplexity": [25.0, None]},
    )
    assert harness.points() == [(5, 2.5)]
    assert harness.points("eval-val-perplexity") == [(5, 25.0)]
    assert harness.executor.launches == 1
    assert harness.messages() == ["val added", "val of round 5: loss 2.5"]
    assert EvaluationAttempt.objects.get().ended_at is not None


def test_deleted_weights_are_skipped(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5, weights=False)
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert row.state == "skipped" and "were deleted" in row.message
    assert harness.executor.launches == 0


def test_a_result_that_the_bucket_has_needs_no_job(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.write(5, 1.5)
    harness.tick()
    assert harness.states() == {5: "succeeded"}
    assert harness.executor.launches == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "e" * 64}, "expected the result of the weights dddd"),
        ({"spec": "0" * 16}, "expected the result"),
        ({"round": 6}, "expected the result"),
        ({"metrics": ()}, "expected 1 to 200 metrics, found 0"),
        (
            {"metrics": (EvaluationMetric(name="loss", value=float("nan")),)},
            "loss: expected a finite number, found nan",
        ),
        (
            {"metrics": (EvaluationMetric(name="loss", value=1.0, stderr=float("inf")),)},
            "loss: expected a finite number, found inf",
        ),
        (
            {"metrics": (EvaluationMetric(name="<b>", value=1.0),)},
            "expected a metric's name of at most 64 letters",
        ),
        (
            {"metrics": (EvaluationMetric(name="loss", value=1.0),) * 2},
            "expected each metric once",
        ),
        (
            {"metrics": tuple(EvaluationMetric(name=f"m{n}", value=1.0) for n in range(201))},
            "expected 1 to 200 metrics, found 201",
        ),
        ({"device": "x" * 70_000}, "expected at most 65536 bytes"),
        ({"tokens": -1}, "expected 0 to"),
    ],
)
def test_an_untrusted_result_is_refused_by_name(
    harness: Evaluations, changes: dict[str, Any], message: str
) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    harness.write(5, 2.0, **changes)
    harness.end()
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.metrics) == ("failed", None)
    assert message in row.message
    assert harness.points() == []


def test_requests_that_cannot_be_carried_out(harness: Evaluations) -> None:
    actor = harness.run.owner
    with pytest.raises(ActionRefused, match=r"expected an evaluation of the run \(none yet\)"):
        evaluations.evaluate(harness.run, "val", actor=actor)
    harness.plan(every=0)
    with pytest.raises(ActionRefused, match="expected a checkpoint, found none yet"):
        evaluations.evaluate(harness.run, "val", actor=actor)
    harness.checkpoint(5)
    with pytest.raises(ActionRefused, match="expected a round with a checkpoint, found 4"):
        evaluations.evaluate(harness.run, "val", actor=actor, round=4)
    harness.tick()
    assert harness.states() == {}
    assert evaluations.evaluate(harness.run, "val", actor=actor)
    assert not evaluations.evaluate(harness.run, "val", actor=actor)
    assert not evaluations.cancel(harness.run, "val", 4, actor=actor)
    assert harness.executor.jobs == {}
