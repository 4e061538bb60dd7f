"""Reads the result of an evaluation from the run's bucket, checks and stores it.

The bucket is untrusted: a record is bounded in size, its metrics in number and name, and all values
are finite. A record that is not a result of this evaluation is refused, with the reason."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.utils import timezone

from diloco.protocol import keys
from diloco.protocol.evaluation import EvaluationResult, EvaluationSpec
from diloco.protocol.records import BadRecord
from diloco.store.base import MissingKey, Store
from runs.ingest.journal import mark_due
from runs.ingest.limits import INT_LIMIT
from runs.ingest.validation import wall
from runs.metrics.blocks import Points
from runs.metrics.changes import Changes
from runs.metrics.downsampling import add_points
from runs.metrics.evaluation_series import series_name
from runs.models import Checkpoint, Evaluation, Round
from runs.queries.publish import publish_changes
from runs.redaction import clean_text
from runs.trackers.mirror import resume_finished
from runs.transitions import record_event


def spec_of(evaluation: Evaluation) -> EvaluationSpec:
    return EvaluationSpec.from_dict(evaluation.plan.spec)


def read_result(evaluation: Evaluation, store: Store) -> EvaluationResult | None:
    """The result that the bucket has; None if there is none.

    Raises :class:`BadRecord` for another record, and for a result of other weights than those of
    the round.
    """
    spec = spec_of(evaluation)
    try:
        result = EvaluationResult.read(store, keys.evaluation(evaluation.round, spec.name))
    except MissingKey:
        return None
    result.check(round=evaluation.round, spec=spec)
    weights = Checkpoint.objects.filter(run=evaluation.run_id, round=evaluation.round)
    known = set(weights.values_list("digest", flat=True))
    if result.weights not in known:
        raise BadRecord(
            f"expected the result of the weights {' or '.join(sorted(known)) or '(none)'}, found "
            f"that of {clean_text(result.weights, 64)}"
        )
    return result


def result_columns(result: EvaluationResult) -> dict[str, Any]:
    """The columns of an evaluation that its result sets."""
    return {
        "metrics": {metric.name: [metric.value, metric.stderr] for metric in result.metrics},
        "tokens": min(result.tokens, INT_LIMIT),
        "data_digest": clean_text(result.data, 64),
        "harness": clean_text(result.harness, 32),
        "device": clean_text(result.device, 80),
    }


def points_of(evaluation: Evaluation, result: EvaluationResult) -> dict[str, Points]:
    """A point of each metric, by series."""
    run, number = evaluation.run, evaluation.round
    tokens = Round.objects.filter(run=run, number=number).values_list("tokens_total", flat=True)
    tokens_total, wall_s = tokens.first() or 0, wall(result.wall_s, timezone.now()).timestamp()
    return {
        series_name(evaluation.plan.name, metric.name): Points.of(
            step=[number * int(run.settings.sync_every)],
            round=[number],
            tokens=[tokens_total],
            wall_s=[wall_s],
            value=[metric.value],
        )
        for metric in result.metrics
    }


def store_result(evaluation: Evaluation, result: EvaluationResult) -> bool:
    """Store the metrics once, as columns and as points of the run. False if it was done before."""
    run, number = evaluation.run, evaluation.round
    changes = Changes()
    with transaction.atomic():
        stored = Evaluation.objects.filter(pk=evaluation.pk, state__in=Evaluation.ACTIVE).update(
            state=Evaluation.State.SUCCEEDED,
            message="",
            ended_at=timezone.now(),
            **result_columns(result),
        )
        if not stored:
            return False
        new = points_of(evaluation, result)
        add_points(run, None, new, key="round")
        resume_finished(run)
        first = result.metrics[0]
        message = f"{evaluation.plan} of round {number}: {first.name} {first.value:.6g}"
        record_event(run, "evaluation", message)
        mark_due(run)
    changes.points = [(name, None, points) for name, points in new.items()]
    publish_changes(run, changes)
    return True
