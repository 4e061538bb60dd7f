"""One control tick of one run: combine backend polls with ingested state, decide, and act.

Celery beat runs a tick every second for each active run; an operator's request starts one
immediately. A tick needs only the database and the backends. Ingest
(:mod:`runs.ingest.ingest_pass`) reads the bucket and :mod:`runs.reconcile.bucket_writes` writes it,
in separate tasks, so neither the content of the bucket nor an unavailable store delays a decision.

A tick is a list of steps. An exception in one step is logged and recorded as an event; the other
steps run. Every write is conditional, so a tick can be repeated, run twice or be killed; the next
tick does what is missing. :mod:`runs.reconcile.decisions` makes the decisions.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from datetime import timedelta

from django.db import DatabaseError
from django.db.models import F, Q
from django.utils import timezone

from runs.alerts import store as alerting
from runs.bulk import update_row
from runs.ingest.journal import mark_due
from runs.models import Event, IngestState, ReplicaAttempt, Run
from runs.queries.publish import publish_changes
from runs.reconcile import billing, bucket_writes, decisions, draining, jobs, replicas
from runs.reconcile.context import LOST_TASK_AFTER, ReconcileContext, beats_of
from runs.reconcile.decisions import RunView
from runs.redaction import clean_text
from runs.states import (
    RUN_ENDED,
    RUN_TRANSITIONS,
    ReplicaState,
    RunState,
)
from runs.task_queue import enqueue
from runs.times import has_passed
from runs.transitions import record_event, transition, transition_replica

logger = logging.getLogger(__name__)

STEP_EVENT_EVERY = timedelta(minutes=5)
"""How often a step that fails at every tick is recorded."""


def reconcile_run(run_id: str) -> bool:
    """Run one tick. Return False if its changes could not be published to the pages.

    Does not raise if a step fails or a backend is unavailable.
    """
    run = Run.objects.select_related("owner").get(pk=run_id)
    now = timezone.now()
    if run.state == RunState.QUEUED:
        if not run.sweep_held and has_passed(run.state_since, LOST_TASK_AFTER, now):
            enqueue("launch_run", str(run.pk), expires=LOST_TASK_AFTER.total_seconds())
        return True
    attempts = jobs.attempts_to_poll(run)
    context = ReconcileContext(
        run=run,
        now=now,
        replicas=list(run.replicas.select_related("pool").order_by("number")),
        attempts=[attempt for attempt in attempts if attempt.ended_at is None],
        jobs=jobs.unprocessed_jobs(attempts),
        started=bool(attempts) or ReplicaAttempt.objects.filter(replica__run=run).exists(),
    )
    forced = run.cancel_at is not None  # the time of the request, never in the future
    if forced:  # first, because polling another backend can take its whole timeout
        _step(context, _end_by_force)
    for step in _steps(forced=forced):
        _step(context, step)
    _step(context, _enqueue_writes)  # before publishing, which can fail on values it cannot show
    _step(context, _publish)
    return context.published


def _steps(*, forced: bool) -> list[Callable[[ReconcileContext], None]]:
    """The steps of a tick in order."""
    return [
        draining.release,
        _poll_backends,
        _read_ingest,
        replicas.cancel_unwanted_launches,
        replicas.give_up_on_unreachable_backends,
        replicas.update_replicas,
        draining.replace_expiring,
        draining.end_hung,
        replicas.relaunch,
        *([] if forced else [draining.cancel_overdue]),
        billing.add_up,
        _update_run,
        alerting.evaluate,
    ]


def _step(context: ReconcileContext, step: Callable[[ReconcileContext], None]) -> None:
    """Run one step. An exception is recorded and does not stop the other steps."""
    try:
        step(context)
    except Exception as error:
        name = step.__name__.strip("_").replace("_", " ")
        context.failed.append(name)
        logger.exception("run %s: the step %r of control failed", context.run.pk, name)
        with contextlib.suppress(DatabaseError):
            _report(context, name, error)


def _report(context: ReconcileContext, name: str, error: Exception) -> None:
    window = (context.now - STEP_EVENT_EVERY, context.now + STEP_EVENT_EVERY)
    recent = Event.objects.filter(run=context.run, kind="control", at__range=window)
    if not recent.filter(message__startswith=f"control: {name} failed").exists():
        record_event(
            context.run,
            "control",
            f"control: {name} failed: {clean_text(f'{type(error).__name__}: {error}', 500)}",
            level=Event.Level.ERROR,
        )


def _end_by_force(context: ReconcileContext) -> None:
    jobs.cancel(context.attempts)


def _poll_backends(context: ReconcileContext) -> None:
    before = {replica.pk: replica.backend_state for replica in context.replicas}

    def before_ends() -> None:
        """Wait for an ingest pass that begins after the job's end: the job's last objects count."""
        IngestState.objects.get_or_create(run=context.run)
        IngestState.objects.filter(run=context.run).update(
            wanted_pass=F("begun_pass") + 1, wanted_at=context.now
        )

    context.jobs |= jobs.poll_jobs(context.attempts, now=context.now, before_ends=before_ends)
    context.changes.replicas |= any(
        attempt.replica.backend_state != before[attempt.replica_id] for attempt in context.attempts
    )


def _read_ingest(context: ReconcileContext) -> None:
    """Load what ingest stored."""
    if not context.started:
        return
    context.ingest = IngestState.objects.filter(run=context.run).first()
    context.beats = beats_of(context.replicas, context.ingest)


def _publish(context: ReconcileContext) -> None:
    context.published = False
    context.published = publish_changes(context.run, context.changes)


def _enqueue_writes(context: ReconcileContext) -> None:
    run = context.run
    if not context.started:
        return
    if context.changes:
        mark_due(run)
    if bucket_writes.has_writes(context):
        enqueue("write_bucket", str(run.pk), expires=LOST_TASK_AFTER.total_seconds())


# The run.


def _update_run(context: ReconcileContext) -> None:
    run = context.run
    if run.state in RUN_ENDED:
        _evict_idle(context)
        return
    if run.state == RunState.PROVISIONING:
        _report_slow_start(context)
    decision = decisions.decide_run(_run_view(context))
    if decision is None:
        return
    if decision.to == run.state:
        if decision.reason != run.state_reason:
            update_row(run, Q(state=run.state), state_reason=decision.reason)
            context.changes.run = True
        return
    if decision.to in RUN_TRANSITIONS[RunState(run.state)]:
        context.changes.run |= transition(run, decision.to, reason=decision.reason)
    if run.state == RunState.STOPPING:
        enqueue("reconcile_run", str(run.pk))


def _run_view(context: ReconcileContext) -> RunView:
    run, now, ingest = context.run, context.now, context.ingest
    settings = run.settings
    began = run.started_at or run.created_at
    pools = {replica.pool_id: replica.pool for replica in context.replicas}
    committed = run.committed_at or run.first_step_at or now
    if run.resumed_at is not None:
        committed = max(committed, run.resumed_at)
    since_commit_s = (now - committed).total_seconds()
    if ingest is not None:  # limited to the time in which rounds were observed, see beats_of
        since_commit_s = min(since_commit_s, ingest.observed_s - ingest.progress_s)
    failed = next((r for r in context.replicas if r.state == ReplicaState.FAILED), None)
    waiting = (ReplicaState.PENDING, ReplicaState.RESTARTING)
    unknown = context.unknown_since
    return RunView(
        state=RunState(run.state),
        quorum=settings.min_quorum,
        target=sum(pool.count for pool in pools.values()),
        replicas=tuple(ReplicaState(r.state) for r in context.replicas),
        training=run.first_step_at is not None,
        final_reason=ingest.final_reason if ingest else "",
        final_round=ingest.final_round if ingest else 0,
        is_settled=context.is_settled,
        unknown=f"progress is unknown since {unknown:%Y-%m-%d %H:%M:%S} UTC: {_trouble(ingest)}"
        if unknown
        else "",
        jobs_open=sum(attempt.ended_at is None for attempt in context.attempts),
        relaunchable=sum(
            r.state in waiting or replicas.relaunch_delay_s(r) is not None for r in context.replicas
        ),
        first_error=f"{failed}: {failed.state_reason}" if failed else "",
        stop_reason=run.state_reason if run.state == RunState.STOPPING else "",
        resuming=run.state == RunState.PROVISIONING and run.resumed_at is not None,
        age_s=(now - began).total_seconds() - run.idle_s,
        time_limit_s=run.time_limit_s,
        start_timeout_s=run.start_timeout_s,
        cost_usd=run.cost_usd,
        budget_usd=run.budget_usd,
        since_commit_s=since_commit_s,
        round_s=run.round_s,
    )


def _trouble(ingest: IngestState | None) -> str:
    message = ingest.message if ingest else ""
    failed = ingest is not None and ingest.trouble == IngestState.Trouble.FAILED
    return f"{'ingest fails' if failed else 'the rendezvous cannot be read'}: {message}"


def _evict_idle(context: ReconcileContext) -> None:
    """Evict replicas without a job when the run has ended."""
    busy = {a.replica_id for a in context.attempts if a.ended_at is None}
    for replica in context.replicas:
        if not replica.ended and replica.pk not in busy and replica.pk not in context.jobs:
            context.changes.replicas |= transition_replica(
                replica, ReplicaState.EVICTED, reason="the run has ended"
            )


def _report_slow_start(context: ReconcileContext) -> None:
    run = context.run
    waited_s = (context.now - run.state_since).total_seconds()
    if waited_s < decisions.SLOW_START_S or run.first_step_at is not None:
        return
    if not Event.objects.filter(run=run, kind="slow_start").exists():
        record_event(
            run,
            "slow_start",
            f"expected a first step within {decisions.SLOW_START_S:g} s of the launch, "
            f"found none after {waited_s:.0f} s",
            level=Event.Level.WARNING,
        )
