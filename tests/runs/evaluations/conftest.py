"""A run with checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.runs import run_harness as w


@pytest.fixture
def harness(
    make_run: Callable[..., Any],
    clock: w.Clock,
    executor: w.FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    from runs.backends.code_bundle import CodeBundle
    from runs.models import Run
    from runs.states import RunState
    from tests.runs.evaluations.evaluation_harness import Evaluations

    for module in ("evaluations.jobs", "backends.attempt_log"):
        monkeypatch.setattr(f"runs.{module}.executor_of", lambda backend, credential: executor)
    bundle = CodeBundle(data=b"code", sha256="c" * 64)
    monkeypatch.setattr("runs.evaluations.jobs.make_bundle", lambda: bundle)
    monkeypatch.setattr("runs.live_stream.publish", lambda run_id, delta: True)
    for module in ("evaluations.schedule", "actions.evaluations"):
        monkeypatch.setattr(f"runs.{module}.enqueue", lambda task, *args, **more: None)
    run = make_run()
    Run.objects.filter(pk=run.pk).update(state=RunState.RUNNING)
    run.refresh_from_db()
    return Evaluations(run, executor, clock)
