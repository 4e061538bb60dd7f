"""Evaluations of a seeded run: results of some rounds, one failed, one running."""

from __future__ import annotations

import math
from typing import Any

from diloco.protocol.evaluation import EvaluationMetric, EvaluationResult, EvaluationSpec

TASKS = ("arc_easy", "hellaswag")


def evaluations(run: Any, *rounds: int, name: str = "val", tasks: tuple[str, ...] = ()) -> Any:
    """A plan of the run with results of ``rounds``."""
    from django.utils import timezone

    from runs import models

    spec = EvaluationSpec(data="s3://acme/validation", tokens=262_144, tasks=tasks, examples=200)
    plan = models.EvaluationPlan.objects.create(
        run=run,
        name=name,
        spec={"data": spec.data, "tokens": spec.tokens, "tasks": list(tasks), "examples": 200},
        backend="local",
        hardware="cpu",
        created_at=timezone.now(),
    )
    for number in rounds:
        succeed(queue(plan, number), spec)
    return plan


def queue(plan: Any, number: int, **columns: Any) -> Any:
    from django.utils import timezone

    from runs import models

    now = timezone.now()
    evaluation = models.Evaluation.objects.create(
        plan=plan, run=plan.run, round=number, created_at=now, next_at=now, **columns
    )
    models.EvaluationAttempt.objects.create(
        evaluation=evaluation,
        number=1,
        launch_key=f"{plan.run.pk.hex[:12]}-e{evaluation.pk}-1",
        created_at=now,
        log="reading the shards\nerror: data: expected token shards, found none",
    )
    return evaluation


def succeed(evaluation: Any, spec: EvaluationSpec) -> None:
    """Store a result as the control plane does."""
    from runs import live_stream
    from runs.evaluations import results

    number = evaluation.round
    loss = 1.9 + 2.2 * math.exp(-number / 4)
    metrics = [
        EvaluationMetric(name="loss", value=loss, stderr=0.012),
        EvaluationMetric(name="perplexity", value=math.exp(loss), stderr=0.1),
        *(
            EvaluationMetric(name=f"{task}_acc", value=0.25 + 0.02 * number, stderr=0.031)
            for task in spec.tasks
        ),
    ]
    result = EvaluationResult(
        round=number,
        spec=spec.name,
        weights="d" * 64,
        data="",
        metrics=tuple(metrics),
        tokens=spec.tokens,
        harness="",
        device="cpu",
        seconds=1.0,
        wall_s=evaluation.created_at.timestamp(),
    )
    publish, live_stream.publish = live_stream.publish, lambda run_id, delta: True
    try:
        results.store_result(evaluation, result)
    finally:
        live_stream.publish = publish
