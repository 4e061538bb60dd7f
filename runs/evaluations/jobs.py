"""The backend job of an evaluation: start, poll and end it.

The launch key is in the database before the backend is called, and the backend identifies the job
by it. Each step can be repeated after a crash."""

from __future__ import annotations

import json
import os

from django.db import transaction
from django.db.models import Max, Q
from django.utils import timezone

from diloco.protocol import keys
from diloco.store.base import Store
from executors.base import (
    AccountError,
    CodeRef,
    JobState,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
)
from executors.executor import Executor
from runs.backends.attempt_log import read_job_log
from runs.backends.code_bundle import make_bundle
from runs.backends.executors import executor_of
from runs.backends.prices import list_price
from runs.backends.requirements import evaluation_requirements
from runs.bulk import update_row
from runs.credentials import job_secrets
from runs.evaluations.results import spec_of
from runs.ingest.journal import mark_due
from runs.local_access import refused_local
from runs.models import Evaluation, EvaluationAttempt, Run
from runs.reconcile.billing import cost_usd, update_total
from runs.reconcile.retry_policy import NOT_STARTED
from runs.redaction import clean_text
from runs.times import from_wall

ENTRYPOINT = "diloco.evaluate"
LOG_LINES, LOG_CHARS = 100, 16_000
"""End of a job's output that is stored."""


def launch_prefix(run: Run) -> str:
    """Begins the launch keys of a run's evaluations. They have the round, the plan's name and the
    number of the attempt, and no row id: in a restored database an attempt has the same key, and
    finds its job instead of starting another."""
    return f"{run.pk.hex[:12]}-e"


def begin_attempt(evaluation: Evaluation) -> EvaluationAttempt | None:
    """Store the launch key of the next attempt, and that the evaluation runs. None if it was
    cancelled meanwhile, or if another evaluation of the run has a job."""
    plan, now = evaluation.plan, timezone.now()
    with transaction.atomic():
        Run.objects.select_for_update().get(pk=evaluation.run_id)
        others = Evaluation.objects.filter(run=evaluation.run_id).exclude(pk=evaluation.pk)
        if others.filter(state__in=Evaluation.WITH_JOB).exists():
            return None
        is_queued = Q(state=Evaluation.State.QUEUED)
        if not update_row(evaluation, is_queued, state=Evaluation.State.RUNNING, message=""):
            return None
        plan.refresh_from_db()  # from here on it keeps its backend
        number = (evaluation.attempts.aggregate(last=Max("number"))["last"] or 0) + 1
        mark_due(evaluation.run)
        return EvaluationAttempt.objects.create(
            evaluation=evaluation,
            number=number,
            launch_key=f"{launch_prefix(evaluation.run)}{evaluation.round}-{plan.name}-{number}",
            created_at=now,
            price_usd_h=list_price(plan.backend, plan.hardware, spot=False),
        )


def launch(attempt: EvaluationAttempt, store: Store) -> None:
    """Start the job, or complete one that was begun. Idempotent: one job.

    Raises :class:`~executors.base.ExecutorError` and the errors of the store.
    """
    evaluation = attempt.evaluation
    plan, run = evaluation.plan, evaluation.run
    if problem := refused_local(plan.created_by or run.owner, plan.backend, run.workload):
        raise AccountError(problem)
    executor = _executor(evaluation)
    remote = executor.capabilities.remote
    bundle = make_bundle()
    store.create(keys.code_bundle(bundle.sha256), bundle.data)
    limit_s = executor.capabilities.max_lifetime_s
    timeout_s = min(plan.timeout_s, limit_s) if limit_s else plan.timeout_s
    secrets = job_secrets(run, plan.backend, name=attempt.launch_key, lifetime_s=timeout_s)
    spec = ReplicaSpec(
        launch_key=attempt.launch_key,
        replica=0,
        hardware=plan.hardware,
        timeout_s=timeout_s,
        labels={"archipelago-run": run.pk.hex},
        secrets=secrets.environment,
    )
    [handle] = executor.ensure(
        [spec],
        ENTRYPOINT,
        {"args": arguments(evaluation)},
        env={} if remote else {"OMP_NUM_THREADS": str(_threads(evaluation))},
        code=CodeRef(
            uri=run.rendezvous,
            sha256=bundle.sha256,
            archives=(run.archive_id,) if run.archive_id else (),
            requirements=evaluation_requirements(
                run, remote=remote, tasks=bool(spec_of(evaluation).tasks)
            ),
        ),
    )
    update_row(attempt, handle=json.loads(handle.to_json()), launched_at=timezone.now())


def arguments(evaluation: Evaluation) -> list[str]:
    """Arguments of ``python -m diloco.evaluate``."""
    spec = spec_of(evaluation)
    return [
        evaluation.run.rendezvous,
        *("--round", str(evaluation.round)),
        *("--data", spec.data),
        *("--tokens", str(spec.tokens)),
        *("--tasks", ",".join(spec.tasks)),
        *("--examples", str(spec.examples)),
    ]


def _threads(evaluation: Evaluation) -> int:
    """A fair share of this machine's cores beside the replicas of the run."""
    run = evaluation.run
    others = 0 if run.ended else run.replicas.count()
    return max(1, (os.cpu_count() or 1) // (others + 1))


def poll(attempt: EvaluationAttempt) -> ReplicaStatus | None:
    """The status of the job; None if there is none. Also finds one by its launch key, because the
    worker that launched it can have died before it stored the handle. Stores what the backend
    reports of start, end and cost."""
    executor = _executor(attempt.evaluation)
    if attempt.handle is None:
        handle = executor.find(attempt.launch_key)
        if handle is None:
            return None
        update_row(attempt, handle=json.loads(handle.to_json()))
    [status] = executor.poll([_handle(attempt)])
    now = timezone.now()
    started = attempt.started_at
    if (reported := from_wall(status.started_wall_s)) is not None:
        started = reported
    elif status.state == JobState.RUNNING and started is None:
        started = attempt.launched_at or now
    ended = attempt.ended_at
    if status.state == JobState.ENDED and ended is None:
        ended = from_wall(status.ended_wall_s) or now
    cost = cost_usd(
        price_usd_h=attempt.price_usd_h,
        launched_at=None,
        started_at=started,
        ended_at=ended,
        now=now,
        billed_s=status.billed_s,
    )
    if (started, cost) != (attempt.started_at, attempt.cost_usd):
        update_row(attempt, started_at=started, cost_usd=cost)
    if cost:
        update_total(attempt.evaluation.run)
    return status


def close(attempt: EvaluationAttempt, status: ReplicaStatus) -> None:
    """Store the end of the job, and the end of its output."""
    plan = attempt.evaluation.plan
    tail = read_job_log(_handle(attempt), plan.backend, plan.credential, lines=LOG_LINES)
    log = "\n".join(tail.lines) or (f"(no log: {tail.unknown})" if tail.unknown else "")
    reason = {"cause": str(status.cause or ""), "message": clean_text(status.message, 500)}
    update_row(
        attempt,
        ended_at=from_wall(status.ended_wall_s) or timezone.now(),
        exit_code=status.exit_code,
        log=clean_text(log[-LOG_CHARS:], LOG_CHARS),
        **({} if attempt.cause == NOT_STARTED else reason),  # our own reason is more precise
    )


def cancel(attempt: EvaluationAttempt) -> None:
    """Ask the backend to end the job."""
    if attempt.handle is not None:
        _executor(attempt.evaluation).cancel([_handle(attempt)])


def _executor(evaluation: Evaluation) -> Executor:
    return executor_of(evaluation.plan.backend, evaluation.plan.credential)


def _handle(attempt: EvaluationAttempt) -> ReplicaHandle:
    assert attempt.handle is not None
    return ReplicaHandle(**attempt.handle)
