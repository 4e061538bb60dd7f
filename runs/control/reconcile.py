"""One tick of one run: look at its backends and its bucket, and bring the tables up to date.

Called by beat every second for each active run, and at once after a person asked for something.
Every write is conditional, so a tick that is repeated, doubled or killed half-way does no harm;
what it did not get to, the next one does. The decisions are :mod:`runs.control.decide`'s.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from django.utils import timezone

from diloco.rendezvous import keys
from diloco.rendezvous.records import BadRecord
from diloco.rendezvous.store import Store, StoreError, StoreUnavailable
from runs.alerting import book as alerting
from runs.bucket.beats import read_leases, store_leases
from runs.bucket.commands import send_save, send_stop
from runs.bucket.history import ingest_rounds
from runs.bucket.ingest import ingest_telemetry
from runs.bucket.journal import write_journal
from runs.bucket.reading import refuse
from runs.bucket.results import ingest_checkpoints, read_final, store_final
from runs.bucket.stores import store_for
from runs.control import care, costs, decide, jobs, leaving
from runs.control.decide import RunView
from runs.control.publish import publish_changes
from runs.control.tick import LOST_TASK_AFTER, Tick
from runs.models import Event, Journal, ReplicaAttempt, Run
from runs.queue import enqueue
from runs.states import (
    REPLICA_ENDED,
    RUN_ENDED,
    RUN_TRANSITIONS,
    ReplicaState,
    RunState,
)
from runs.transitions import record_event, transition, transition_replica

logger = logging.getLogger(__name__)

STORE_EVENT_EVERY = timedelta(minutes=5)
STORE_AWAY_FOR = timedelta(minutes=10)
"""How long a run that was asked to stop waits for a bucket that does not answer."""


def reconcile_run(run_id: str) -> bool:
    """Bring one run up to date. Does not raise when its bucket or a backend is away. False when
    the pages could not be told of it."""
    run = Run.objects.select_related("owner").get(pk=run_id)
    now = timezone.now()
    if run.state == RunState.QUEUED:
        if now - run.state_since > LOST_TASK_AFTER:
            enqueue("launch_run", str(run.pk), expires=LOST_TASK_AFTER.total_seconds())
        return True
    attempts = jobs.attempts_to_look_at(run)
    tick = Tick(
        run=run,
        now=now,
        replicas=list(run.replicas.select_related("pool", "run").order_by("number")),
        attempts=[attempt for attempt in attempts if attempt.ended_at is None],
        jobs=jobs.unjudged_jobs(attempts),
    )
    leaving.release(tick)
    said = {replica.pk: replica.backend_state for replica in tick.replicas}
    tick.jobs |= jobs.poll_jobs(tick.attempts, now=now)
    tick.changes.replicas = any(
        attempt.replica.backend_state != said[attempt.replica_id] for attempt in tick.attempts
    )
    store: Store | None = None
    try:
        # Without an attempt nothing in there is this run's, and all of it may be another's.
        if ReplicaAttempt.objects.filter(replica__run=run).exists():
            store = store_for(run)
            _read_bucket(tick, store)
    except StoreError as error:
        store = None
        # Where trying again cannot help, what is not there now will not come.
        tick.bucket_was_read = not isinstance(error, StoreUnavailable)
        _store_is_away(run, error, now)
    care.call_off_launches(tick)
    care.give_up_on_silent_backends(tick)
    care.judge_replicas(tick)
    leaving.hand_over(tick)
    leaving.end_hung(tick)
    care.relaunch(tick)
    leaving.cancel_what_must_end(tick)
    costs.add_up(tick)
    _judge_run(tick)
    alerting.watch(tick)
    told = publish_changes(run, tick.changes)
    if store is not None:
        _keep_journal(tick, store)
    return told


def _read_bucket(tick: Tick, store: Store) -> None:
    run = tick.run
    # One that is ended by force could still write final weights, and then not be resumed.
    stops = run.stop_requested_at is not None and run.cancel_at is None
    if stops and run.stop_sent_at is None:
        send_stop(run, store, tick.now)
    leaving.send_drains(tick, store)
    leases = read_leases(store)
    tick.beats = store_leases(run, tick.replicas, leases, now=tick.now)
    tick.changes.replicas |= any(beat.changed for beat in tick.beats.values())
    # First: an evaluation is dated by the tokens of its round.
    tick.every_round_was_read = ingest_rounds(run, store, now=tick.now, changes=tick.changes)
    open_ids = {attempt.replica_id for attempt in tick.attempts if attempt.ended_at is None}
    ingest_telemetry(
        run,
        store,
        tick.replicas,
        leases.incarnations,
        ended=frozenset(r.number for r in tick.replicas if r.pk not in open_ids),
        now=tick.now,
        changes=tick.changes,
    )
    run.refresh_from_db()
    if run.save_requested_at is not None and run.save_sent_at != run.save_requested_at:
        send_save(run, store, tick.now)  # of a round after those that we have seen just now
    if tick.changes.rounds or run.state in RUN_ENDED:
        ingest_checkpoints(run, store, now=tick.now)
    try:
        tick.final = read_final(run, store)
    except BadRecord as error:
        refuse(run, keys.FINAL_MANIFEST, error)
    if tick.final is not None:
        store_final(run, store, tick.final, now=tick.now)
    _sum_up(tick)


def _sum_up(tick: Tick) -> None:
    """Header figures that are made of the replicas' own."""
    live = [r for r in tick.replicas if r.state not in REPLICA_ENDED]
    losses = [r.loss for r in live if r.loss is not None]
    rates = [r.tokens_per_s for r in live if r.tokens_per_s is not None]
    if not tick.changes.replicas or not (losses or rates):
        return
    fields = {
        "train_loss": sum(losses) / len(losses) if losses else tick.run.train_loss,
        "tokens_per_s": sum(rates) if rates else None,
    }
    Run.objects.filter(pk=tick.run.pk).update(**fields)
    for name, value in fields.items():
        setattr(tick.run, name, value)
    tick.changes.run = True


def _keep_journal(tick: Tick, store: Store) -> None:
    try:
        write_journal(tick.run, store, now=tick.now, changed=bool(tick.changes))
    except StoreError as error:
        # All of it is found again at the next tick, if there is one.
        again = isinstance(error, StoreUnavailable)
        Journal.objects.filter(run=tick.run).update(due=again)
        _store_is_away(tick.run, error, tick.now)


def _store_is_away(run: Run, error: StoreError, now: datetime) -> None:
    logger.warning("run %s: the rendezvous could not be read: %s", run.pk, error)
    told = Event.objects.filter(run=run, kind="store", at__gt=now - STORE_EVENT_EVERY)
    if not told.exists():
        record_event(
            run, "store", f"the rendezvous could not be read: {error}", level=Event.Level.WARNING
        )


# The run.


def _judge_run(tick: Tick) -> None:
    run = tick.run
    if run.state in RUN_ENDED:
        _let_go(tick)
        return
    if run.state == RunState.PROVISIONING:
        _say_if_slow(run, tick.now)
    if not tick.bucket_was_read and not _waited_for_the_bucket(run, tick.now):
        return  # it may hold the result
    if not tick.every_round_was_read:
        return  # an ended run is not looked after; and what it does now is not known yet
    verdict = decide.judge_run(_run_view(tick))
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


def _waited_for_the_bucket(run: Run, now: datetime) -> bool:
    return run.stop_requested_at is not None and now - run.stop_requested_at > STORE_AWAY_FOR


def _run_view(tick: Tick) -> RunView:
    run, now = tick.run, tick.now
    settings = run.group_settings
    began = run.started_at or run.created_at
    pools = {replica.pool_id: replica.pool for replica in tick.replicas}
    committed = run.committed_at or run.first_step_at or now
    if run.resumed_at is not None:
        committed = max(committed, run.resumed_at)
    failed = next((r for r in tick.replicas if r.state == ReplicaState.FAILED), None)
    waiting = (ReplicaState.PENDING, ReplicaState.RESTARTING)
    return RunView(
        state=RunState(run.state),
        quorum=int(settings["min_quorum"]),
        target=sum(pool.count for pool in pools.values()),
        replicas=tuple(ReplicaState(r.state) for r in tick.replicas),
        training=run.first_step_at is not None,
        final_reason=tick.final.reason if tick.final else "",
        final_round=tick.final.round if tick.final else 0,
        jobs_open=sum(attempt.ended_at is None for attempt in tick.attempts),
        relaunchable=sum(
            r.state in waiting or care.relaunch_delay_s(r) is not None for r in tick.replicas
        ),
        first_error=f"{failed}: {failed.state_reason}" if failed else "",
        stop_reason=run.state_reason if run.state == RunState.STOPPING else "",
        resuming=run.state == RunState.PROVISIONING and run.resumed_at is not None,
        age_s=(now - began).total_seconds() - run.idle_s,
        time_limit_s=run.time_limit_s,
        start_timeout_s=run.start_timeout_s,
        cost_usd=run.cost_usd,
        budget_usd=run.budget_usd,
        since_commit_s=(now - committed).total_seconds(),
        round_s=run.round_s,
    )


def _let_go(tick: Tick) -> None:
    """A replica that never got a job, or lost it, has nothing to wait for when the run is over."""
    busy = {a.replica_id for a in tick.attempts if a.ended_at is None}
    for replica in tick.replicas:
        if not replica.ended and replica.pk not in busy and replica.pk not in tick.jobs:
            tick.changes.replicas |= transition_replica(
                replica, ReplicaState.EVICTED, reason="the run is over"
            )


def _say_if_slow(run: Run, now: datetime) -> None:
    waited_s = (now - run.state_since).total_seconds()
    if waited_s < decide.SLOW_START_S:
        return
    if not Event.objects.filter(run=run, kind="slow_start").exists():
        record_event(
            run,
            "slow_start",
            f"expected a first step within {decide.SLOW_START_S:g} s of the launch, "
            f"found none after {waited_s:.0f} s",
            level=Event.Level.WARNING,
        )
