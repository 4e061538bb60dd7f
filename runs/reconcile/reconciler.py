"""One control tick of one run: what its backends say and what ingest has stored, and what follows.

Called by beat every second for each active run, and at once after a person asked for something. It
needs the database and the backends only. The bucket is read by ingest
(:mod:`runs.ingest.ingest_pass`) and written by :mod:`runs.reconcile.bucket_writes`, each in a task
of its own, so nothing that a replica writes and no state of a store delays a decision.

A tick is a list of steps. One that raises is logged and reported as an event, and the others run.
Every write is conditional, so a tick that is repeated, doubled or killed half-way does no harm;
what it did not get to, the next one does. The decisions are :mod:`runs.reconcile.decisions`'s.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from datetime import timedelta

from django.db import DatabaseError
from django.db.models import F
from django.utils import timezone

from runs.alerts import store as alerting
from runs.ingest.journal import mark_due
from runs.models import Event, IngestState, ReplicaAttempt, Run
from runs.queries.publish import publish_changes
from runs.reconcile import billing, bucket_writes, decisions, draining, jobs, replicas
from runs.reconcile.context import LOST_TASK_AFTER, WAIT_FOR_BUCKET, Tick, beats_of
from runs.reconcile.decisions import RunView
from runs.states import (
    RUN_ENDED,
    RUN_TRANSITIONS,
    ReplicaState,
    RunState,
)
from runs.task_queue import enqueue
from runs.times import has_passed
from runs.transitions import clean_text, record_event, transition, transition_replica

logger = logging.getLogger(__name__)

STORE_AWAY_FOR = WAIT_FOR_BUCKET
STEP_EVENT_EVERY = timedelta(minutes=5)
"""A step that fails at every tick is reported this often."""


def reconcile_run(run_id: str) -> bool:
    """Bring one run up to date. Does not raise when a step fails or a backend is away. False when
    the pages could not be sent what it changed."""
    run = Run.objects.select_related("owner").get(pk=run_id)
    now = timezone.now()
    if run.state == RunState.QUEUED:
        if has_passed(run.state_since, LOST_TASK_AFTER, now):
            enqueue("launch_run", str(run.pk), expires=LOST_TASK_AFTER.total_seconds())
        return True
    attempts = jobs.attempts_to_look_at(run)
    tick = Tick(
        run=run,
        now=now,
        replicas=list(run.replicas.select_related("pool", "run").order_by("number")),
        attempts=[attempt for attempt in attempts if attempt.ended_at is None],
        jobs=jobs.unjudged_jobs(attempts),
        started=bool(attempts) or ReplicaAttempt.objects.filter(replica__run=run).exists(),
    )
    forced = run.cancel_at is not None  # set to the time of the request, never ahead
    if forced:  # before anything else: a poll of another backend can take its whole patience
        _step(tick, _end_by_force)
    for step in _steps(forced=forced):
        _step(tick, step)
    _step(tick, _enqueue_writes)  # before the pages, which may have values that cannot be shown
    _step(tick, _publish)
    return tick.published


def _steps(*, forced: bool) -> list[Callable[[Tick], None]]:
    """In their order."""
    return [
        draining.release,
        _poll_backends,
        _read_ingest,
        replicas.call_off_launches,
        replicas.give_up_on_silent_backends,
        replicas.judge_replicas,
        draining.hand_over,
        draining.end_hung,
        replicas.relaunch,
        *([] if forced else [draining.cancel_what_must_end]),
        billing.add_up,
        _judge_run,
        alerting.watch,
    ]


def _step(tick: Tick, step: Callable[[Tick], None]) -> None:
    """Run one step. What it raises is reported and stops no other step."""
    try:
        step(tick)
    except Exception as error:
        name = step.__name__.strip("_").replace("_", " ")
        tick.failed.append(name)
        logger.exception("run %s: the step %r of control failed", tick.run.pk, name)
        with contextlib.suppress(DatabaseError):
            _report(tick, name, error)


def _report(tick: Tick, name: str, error: Exception) -> None:
    lately = (tick.now - STEP_EVENT_EVERY, tick.now + STEP_EVENT_EVERY)
    recent = Event.objects.filter(run=tick.run, kind="control", at__range=lately)
    if not recent.filter(message__startswith=f"control: {name} failed").exists():
        record_event(
            tick.run,
            "control",
            f"control: {name} failed: {clean_text(f'{type(error).__name__}: {error}', 500)}",
            level=Event.Level.ERROR,
        )


def _end_by_force(tick: Tick) -> None:
    jobs.cancel(tick.attempts)


def _poll_backends(tick: Tick) -> None:
    before = {replica.pk: replica.backend_state for replica in tick.replicas}

    def before_ends() -> None:
        """What an ended job wrote last is in the bucket: wait for a pass that begins after this."""
        IngestState.objects.get_or_create(run=tick.run)
        IngestState.objects.filter(run=tick.run).update(
            wanted_pass=F("begun_pass") + 1, wanted_at=tick.now
        )

    tick.jobs |= jobs.poll_jobs(tick.attempts, now=tick.now, before_ends=before_ends)
    tick.changes.replicas |= any(
        attempt.replica.backend_state != before[attempt.replica_id] for attempt in tick.attempts
    )


def _read_ingest(tick: Tick) -> None:
    """What ingest has stored of the bucket."""
    if not tick.started:
        return
    tick.ingest = IngestState.objects.filter(run=tick.run).first()
    tick.beats = beats_of(tick.replicas, tick.ingest)


def _publish(tick: Tick) -> None:
    tick.published = False
    tick.published = publish_changes(tick.run, tick.changes)


def _enqueue_writes(tick: Tick) -> None:
    run = tick.run
    if not tick.started:
        return
    if tick.changes:
        mark_due(run)
    if bucket_writes.has_writes(tick):
        enqueue("write_bucket", str(run.pk), expires=LOST_TASK_AFTER.total_seconds())


# The run.


def _judge_run(tick: Tick) -> None:
    run = tick.run
    if run.state in RUN_ENDED:
        _let_go(tick)
        return
    if run.state == RunState.PROVISIONING:
        _say_if_slow(tick)
    verdict = decisions.judge_run(_run_view(tick))
    if verdict is None:
        return
    if verdict.to == run.state:
        if verdict.reason != run.state_reason:
            Run.objects.filter(pk=run.pk, state=run.state).update(state_reason=verdict.reason)
            run.state_reason = verdict.reason
            tick.changes.run = True
        return
    if verdict.to in RUN_TRANSITIONS[RunState(run.state)]:
        tick.changes.run |= transition(run, verdict.to, reason=verdict.reason)
    if run.state == RunState.STOPPING:
        enqueue("reconcile_run", str(run.pk))


def _run_view(tick: Tick) -> RunView:
    run, now, ingest = tick.run, tick.now, tick.ingest
    settings = run.group_settings
    began = run.started_at or run.created_at
    pools = {replica.pool_id: replica.pool for replica in tick.replicas}
    committed = run.committed_at or run.first_step_at or now
    if run.resumed_at is not None:
        committed = max(committed, run.resumed_at)
    since_commit_s = (now - committed).total_seconds()
    if ingest is not None:  # not longer than the rounds were looked at: see beats_of
        since_commit_s = min(since_commit_s, ingest.observed_s - ingest.progress_s)
    failed = next((r for r in tick.replicas if r.state == ReplicaState.FAILED), None)
    waiting = (ReplicaState.PENDING, ReplicaState.RESTARTING)
    unknown = tick.unknown_since
    return RunView(
        state=RunState(run.state),
        quorum=int(settings["min_quorum"]),
        target=sum(pool.count for pool in pools.values()),
        replicas=tuple(ReplicaState(r.state) for r in tick.replicas),
        training=run.first_step_at is not None,
        final_reason=ingest.final_reason if ingest else "",
        final_round=ingest.final_round if ingest else 0,
        is_settled=tick.is_settled,
        unknown=f"progress is unknown since {unknown:%Y-%m-%d %H:%M:%S} UTC: {_trouble(ingest)}"
        if unknown
        else "",
        jobs_open=sum(attempt.ended_at is None for attempt in tick.attempts),
        relaunchable=sum(
            r.state in waiting or replicas.relaunch_delay_s(r) is not None for r in tick.replicas
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


def _let_go(tick: Tick) -> None:
    """A replica that never got a job, or lost it, has nothing to wait for when the run is over."""
    busy = {a.replica_id for a in tick.attempts if a.ended_at is None}
    for replica in tick.replicas:
        if not replica.ended and replica.pk not in busy and replica.pk not in tick.jobs:
            tick.changes.replicas |= transition_replica(
                replica, ReplicaState.EVICTED, reason="the run is over"
            )


def _say_if_slow(tick: Tick) -> None:
    run = tick.run
    waited_s = (tick.now - run.state_since).total_seconds()
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
