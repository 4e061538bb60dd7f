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
    from runs.models import Run
    from runs.states import RunState
    from tests.runs.evaluations.evaluation_harness import Evaluations, connect

    connect(monkeypatch, executor)
    monkeypatch.setattr("runs.live_stream.publish", lambda run_id, delta: True)
    run = make_run()
    Run.objects.filter(pk=run.pk).update(state=RunState.RUNNING)
    run.refresh_from_db()
    return Evaluations(run, executor, clock)
