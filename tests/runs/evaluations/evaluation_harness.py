"""A run whose checkpoints are evaluated by jobs that a test ends."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from diloco.protocol import keys
from diloco.protocol.evaluation import EvaluationMetric, EvaluationResult, EvaluationSpec
from executors.base import Cause
from runs.actions import evaluations
from runs.backends.code_bundle import CodeBundle
from runs.evaluations import advance, schedule
from runs.metrics import charts
from runs.models import Checkpoint, Evaluation, EvaluationAttempt, Run
from runs.submit.run_draft import PlanDraft
from tests.runs import run_harness as w

DIGEST = "d" * 64


class Killed(BaseException):
    """The worker was killed: no handler of the product sees it."""


def connect(monkeypatch: pytest.MonkeyPatch, executor: w.FakeExecutor) -> None:
    """Let evaluations have the jobs of ``executor``, and no task queue."""
    for module in ("evaluations.jobs", "backends.attempt_log"):
        monkeypatch.setattr(f"runs.{module}.executor_of", lambda backend, credential: executor)
    bundle = CodeBundle(data=b"code", sha256="c" * 64)
    monkeypatch.setattr("runs.evaluations.jobs.make_bundle", lambda: bundle)
    for module in ("evaluations.schedule", "actions.evaluations"):
        monkeypatch.setattr(f"runs.{module}.enqueue", lambda task, *args, **more: None)


class Evaluations:
    """A run with checkpoints, its bucket, and a backend whose jobs end when the test ends them."""

    def __init__(self, run: Run, executor: w.FakeExecutor, clock: w.Clock) -> None:
        from runs.ingest.stores import store_for

        self.run, self.executor, self.clock = run, executor, clock
        self.store = store_for(run)

    def checkpoint(self, round: int, *, final: bool = False, weights: bool = True) -> None:
        folder = keys.checkpoint_dir(round, 0, w.incarnation(0))
        key = f"{folder}weights.safetensors"
        if final:
            key = f"{keys.final_dir(0, w.incarnation(0))}model.safetensors"
        if weights:
            self.store.put(key, b"weights")
        Checkpoint.objects.create(
            run=self.run, round=round, final=final, key=key, size_bytes=7, digest=DIGEST,
            created_at=timezone.now(),
        )  # fmt: skip

    def plan(self, **columns: Any) -> Any:
        draft = PlanDraft(**({"name": "val"} | columns))
        return evaluations.save_plan(self.run, draft, actor=self.run.owner)

    def tick(self) -> None:
        """Queue what is new, and make each step that is due."""
        schedule.call_for_due()
        active = Evaluation.objects.filter(run=self.run, state__in=Evaluation.ACTIVE)
        for pk in active.order_by("round").values_list("pk", flat=True):
            advance.advance(pk)
        self.clock.pass_s(3)

    def key(self) -> str:
        """The launch key of the newest attempt."""
        return str(EvaluationAttempt.objects.order_by("-pk").values_list("launch_key")[0][0])

    def write(self, at: int, loss: float, **changes: Any) -> None:
        """Write the result of round ``at``, with ``changes``."""
        values: dict[str, Any] = {
            "round": at,
            "spec": EvaluationSpec().name,
            "weights": DIGEST,
            "data": "",
            "metrics": (
                EvaluationMetric(name="loss", value=loss, stderr=0.1),
                EvaluationMetric(name="perplexity", value=10.0 * loss),
            ),
            "tokens": 100,
            "harness": "",
            "device": "cpu",
            "seconds": 1.0,
            "wall_s": self.clock().timestamp(),
        }
        result = EvaluationResult(**(values | changes))
        self.store.put(keys.evaluation(at, EvaluationSpec().name), result.to_bytes())

    def end(self, cause: Cause = Cause.DONE, *, code: int = 0) -> None:
        self.executor.end(self.key(), cause, code=code)

    def states(self) -> dict[int, str]:
        found = Evaluation.objects.filter(run=self.run)
        return {row.round: row.state for row in found}

    def points(self, series: str = "eval-val-loss") -> list[tuple[int, float]]:
        curves = charts.read(self.run, [(series, None)], charts.Window(max_points=10**6))
        points = [c.points for c in curves]
        return [(int(r), float(v)) for p in points for r, v in zip(p.round, p.value, strict=True)]

    def messages(self) -> list[str]:
        events = self.run.events.filter(kind="evaluation").order_by("pk")
        return [str(message) for message in events.values_list("message", flat=True)]
