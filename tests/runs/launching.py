"""Helpers of the launch tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.runs import run_harness as w

MakeRun = Callable[..., Any]


class Killed(Exception):
    """Simulates SIGKILL of a worker: no handler catches it."""


def launched(run: Any) -> Any:
    from runs.reconcile.launch import launch_run

    launch_run(str(run.pk))
    run.refresh_from_db()
    return run


def one_job_each(run: Any, executor: w.FakeExecutor) -> None:
    for replica in run.replicas.all():
        [attempt] = replica.attempts.all()
        assert attempt.handle["launch_key"] == attempt.launch_key
        assert replica.state == "provisioning"
    assert sorted(executor.jobs) == sorted(f"{run.pk.hex[:12]}-{n}-1" for n in (0, 1))
    assert executor.launches == 2
