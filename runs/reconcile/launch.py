"""Launches a run: from the queue to jobs on backends.

Each step records its intent, acts, and records the result. The group's fingerprint is in the
database before ``group.json`` is in the bucket; an attempt's launch key is in the database before
the backend is called. After a crash all steps can be repeated: ``group.json`` and the code bundle
are create-once, and a backend identifies a job by its launch key.

:mod:`runs.tasks` runs these steps, possibly twice. :mod:`runs.reconcile.reconciler` enqueues steps
that were lost.
"""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

from django.db import connections, transaction
from django.db.models import Q
from django.utils import timezone

from diloco.protocol import keys
from diloco.protocol.settings import SettingsError
from diloco.store.base import (
    MissingKey,
    StoreDenied,
    StoreUnavailable,
)
from diloco.store.retry import RUN_HAS_TRAINED
from executors.base import (
    AccountError,
    CodeRef,
    ExecutorError,
    LaunchRefused,
    NoCapacity,
    ReplicaHandle,
    ReplicaSpec,
    RetryLater,
)
from executors.executor import Executor
from runs.backends import budgets, circuit_breaker, prices
from runs.backends.executors import executor_for
from runs.backends.requirements import replica_requirements
from runs.credentials import replica_secrets
from runs.credentials.restrictions import refused_by_credential
from runs.exceptions import LaunchFailed, LaunchLater
from runs.ingest.stores import store_for
from runs.local_access import refused_by_owner
from runs.models import Replica, ReplicaAttempt, Run
from runs.reconcile import retry_policy
from runs.reconcile.group_publishing import check_group, prepare_resume, publish_group
from runs.reconcile.pending import note_no_capacity
from runs.redaction import clean_text
from runs.states import RUN_ENDED, RUN_LIVE, ReplicaState, RunState
from runs.task_queue import enqueue
from runs.times import is_due
from runs.transitions import record_event, transition, transition_replica

logger = logging.getLogger(__name__)

ENTRYPOINT = "diloco.replica"
RANK_ENV = "REPLICA_RANK"
GIVE_UP_AFTER = timedelta(minutes=10)
"""How long an unavailable backend or bucket is retried before the launch fails."""

THREADS = 16
"""Concurrent launches of one pool."""

_LAUNCHABLE = RUN_LIVE | {RunState.PROVISIONING}
_TO_LAUNCH = (ReplicaState.PENDING, ReplicaState.PROVISIONING, ReplicaState.RESTARTING)


def launch_run(run_id: str) -> None:
    """Write the group and the code into the bucket and enqueue the launch of every pool.

    Idempotent. Raises :class:`LaunchLater` if the bucket is unavailable.
    """
    run = Run.objects.get(pk=run_id)
    if run.sweep_held:
        return
    if run.state == RunState.QUEUED:
        try:
            store = store_for(run)
            publish_group(run, store)
            if run.resumed_at is not None:
                prepare_resume(run, store)
        except (StoreUnavailable, LaunchFailed, StoreDenied, SettingsError) as error:
            if _is_outage(run, error) and timezone.now() - run.state_since <= GIVE_UP_AFTER:
                raise LaunchLater(str(error)) from error
            where = "" if run.rendezvous in str(error) else f"{run.rendezvous}: "
            _leave_queue(run, RunState.FAILED, f"could not be launched: {where}{error}")
            return
        _leave_queue(run, RunState.PROVISIONING, "group and code are in the rendezvous")
    if run.state == RunState.PROVISIONING:
        for pool in run.pools.all():
            enqueue("launch_pool", pool.pk)


def _is_outage(run: Run, error: Exception) -> bool:
    """Whether a retry can help. A bucket that denies access after the run has trained counts as
    temporarily misconfigured."""
    denied_again = isinstance(error, StoreDenied) and run.first_step_at is not None
    return isinstance(error, StoreUnavailable) or denied_again


def _leave_queue(run: Run, to: RunState, reason: str) -> None:
    if run.state == RunState.QUEUED:  # the row was read again: an operator can have stopped the run
        transition(run, to, reason=reason)


def launch_pool(pool_id: int) -> None:
    """Launch the pool's waiting replicas in parallel: a backend can take seconds for each, and one
    that hangs must not block every worker.

    Raises :class:`LaunchLater` if some have to be retried.
    """
    waiting = Replica.objects.filter(pool_id=pool_id, state__in=_TO_LAUNCH)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="launch") as pool:
        futures = [
            pool.submit(_launch_in_thread, pk) for pk in waiting.values_list("pk", flat=True)
        ]
    later = [str(f.exception()) for f in futures if isinstance(f.exception(), LaunchLater)]
    for future in futures:
        if future.exception() is not None and not isinstance(future.exception(), LaunchLater):
            future.result()
    if later:
        raise LaunchLater(later[0])


def _launch_in_thread(replica_id: int) -> None:
    try:
        launch_replica(replica_id)
    finally:
        connections.close_all()  # those of this thread


def launch_replica(replica_id: int) -> None:
    """Start the replica's next attempt, or complete one that was begun. Idempotent: one job.

    An attempt is complete only after the executor's ``ensure`` has returned: a job found by its
    launch key can lack its Secret.

    Raises :class:`LaunchLater` if the backend or the bucket is unavailable.
    """
    attempt = _begin(replica_id)
    if attempt is None:
        return
    replica = attempt.replica
    run = replica.run
    pool = replica.pool
    try:
        if problem := refused_by_credential(pool) or refused_by_owner(pool, run):
            raise AccountError(problem)
        executor = executor_for(pool)
        handle = _ensure(executor, run, attempt)
    except AccountError as error:
        _wait_for_intervention(attempt, error)
        return
    except (LaunchRefused, LaunchFailed, MissingKey) as error:
        _refuse(attempt, error)
        return
    except (RetryLater, StoreUnavailable, StoreDenied) as error:
        if isinstance(error, StoreDenied) and not _is_outage(run, error):
            _refuse(attempt, error)
            return
        if isinstance(error, NoCapacity) and error.attempts is None:
            circuit_breaker.wait_for_capacity(pool, str(error), after_s=error.after_s)
        elif isinstance(error, RetryLater):
            circuit_breaker.count_failure(pool, str(error), after_s=error.after_s)
            if error.attempts is not None and pool.failures >= error.attempts:
                _wait_for_intervention(attempt, error)
                return
        if isinstance(error, NoCapacity):
            note_no_capacity(replica, error, timezone.now())
            raise LaunchLater(str(error)) from error
        # The time limit of a job that exists is in runs.reconcile.pending.
        if attempt.handle is None and timezone.now() - attempt.created_at > GIVE_UP_AFTER:
            # A run that trains waits for its backend as long as the circuit breaker decides.
            is_training = run.state in RUN_LIVE
            to = ReplicaState.RESTARTING if is_training else ReplicaState.FAILED
            _refuse(attempt, error, to=to)
            return
        Replica.objects.filter(pk=replica.pk, state=ReplicaState.PROVISIONING).update(
            state_reason=clean_text(f"{attempt.launch_key} was not launched yet: {error}")
        )
        raise LaunchLater(str(error)) from error
    _complete(attempt, handle)
    run.refresh_from_db()
    if run.state in RUN_ENDED or ReplicaAttempt.objects.filter(
        pk=attempt.pk, ended_at__isnull=False
    ):
        # The launch was cancelled while the backend was starting the job.
        executor.cancel([handle])


def _begin(replica_id: int) -> ReplicaAttempt | None:
    """The attempt to launch now, with its key stored; None if there is nothing to do."""
    with transaction.atomic():
        run_id = Replica.objects.values_list("run_id", flat=True).get(pk=replica_id)
        run = Run.objects.select_for_update().get(pk=run_id)
        replica = (
            Replica.objects.select_for_update(of=("self",))
            .select_related("pool")
            .get(pk=replica_id)
        )
        replica.run = run
        if run.state not in _LAUNCHABLE:
            return None
        last = replica.attempts.order_by("-number").first()
        if replica.state == ReplicaState.PROVISIONING:
            if last is None or last.is_complete or last.ended_at is not None:
                return None
            if circuit_breaker.is_open(replica.pool, timezone.now()):
                return None
            last.replica = replica
            return last
        if replica.state == ReplicaState.RESTARTING:
            if last is not None and last.ended_at is None:
                return None
            if not is_due(replica.relaunch_at, retry_policy.RELAUNCH_WITHIN, timezone.now()):
                return None
        elif replica.state != ReplicaState.PENDING:
            return None
        if not circuit_breaker.can_launch(replica.pool, timezone.now()):
            return None
        if not prices.can_launch(replica.pool, budget=budgets.refusal_of(run, timezone.now())):
            return None
        number = last.number + 1 if last else 1
        attempt = ReplicaAttempt.objects.create(
            replica=replica,
            number=number,
            launch_key=f"{run.pk.hex[:12]}-{replica.number}-{number}",
            created_at=timezone.now(),
        )
        moved = transition_replica(
            replica,
            ReplicaState.PROVISIONING,
            reason=f"launching {attempt.launch_key} on {replica.pool.backend}",
            backend_state="",
            pending_cause="",
            pending_since=None,
            waiting_since=None,
            relaunch_at=None,
            drain_sent_at=None,
            cancel_at=None,
            worked_since=None,
        )
        assert moved, "the replica's row is locked"
        return attempt


def _ensure(executor: Executor, run: Run, attempt: ReplicaAttempt) -> ReplicaHandle:
    replica, pool = attempt.replica, attempt.replica.pool
    bundle = keys.code_bundle(run.code_sha256)
    store = store_for(run)
    check_group(run, store)
    try:
        store.get_range(bundle, 0, 1)
    except MissingKey as error:
        location = f"{run.rendezvous}/{bundle}"
        raise LaunchFailed(f"expected the code bundle at {location}, found none") from error
    lifetime_s = pool.timeout_s or executor.capabilities.max_lifetime_s
    secrets = replica_secrets(run, replica, lifetime_s=lifetime_s)
    spec = ReplicaSpec(
        launch_key=attempt.launch_key,
        replica=replica.number,
        hardware=pool.hardware,
        region=pool.region,
        spot=pool.spot,
        timeout_s=lifetime_s,
        image=pool.image,
        labels={"archipelago-run": run.pk.hex},
        secrets=secrets.environment,
        options=pool.options,
    )
    ReplicaAttempt.objects.filter(pk=attempt.pk).update(
        price_usd_h=pool.price_usd_h,
        cost_usd=None if pool.price_usd_h is None else attempt.cost_usd or 0.0,
        deadline_at=_from_now(lifetime_s),
        expires_at=_expiry(attempt, secrets.lifetime_s),
    )
    [handle] = executor.ensure(
        [spec],
        ENTRYPOINT,
        {"args": [run.rendezvous], "rank_env": RANK_ENV},
        env=replica_env(run, remote=executor.capabilities.remote, attempt=attempt),
        code=code_of(run, remote=executor.capabilities.remote),
    )
    return handle


def _complete(attempt: ReplicaAttempt, handle: ReplicaHandle) -> bool:
    """Record that ``ensure`` has returned: every object of the job exists. False if it was already
    recorded."""
    incomplete = ReplicaAttempt.objects.filter(Q(launched_at=None) | Q(handle=None), pk=attempt.pk)
    saved = incomplete.update(handle=json.loads(handle.to_json()), launched_at=timezone.now())
    if saved:
        action = "launched" if attempt.handle is None else "completed"
        record_event(
            attempt.replica.run, "job", f"{attempt.launch_key} {action}", replica=attempt.replica
        )
    return bool(saved)


def _expiry(attempt: ReplicaAttempt, lifetime_s: float | None) -> datetime | None:
    """When the job's credentials expire. An existing job can have those of an earlier call."""
    if attempt.handle is not None and attempt.expires_at is not None:
        return attempt.expires_at
    return _from_now(lifetime_s)


def _from_now(seconds: float | None) -> datetime | None:
    return None if seconds is None else timezone.now() + timedelta(seconds=seconds)


def code_of(run: Run, *, remote: bool) -> CodeRef:
    """The code that a replica fetches before it starts. A remote image needs more requirements than
    this machine."""
    return CodeRef(
        uri=run.rendezvous,
        sha256=run.code_sha256,
        archives=(run.archive_id,) if run.archive_id else (),
        requirements=replica_requirements(run, remote=remote),
    )


def replica_env(run: Run, *, remote: bool, attempt: ReplicaAttempt) -> dict[str, str]:
    """Environment variables of a replica. They contain nothing about the group.

    ``RUN_HAS_TRAINED`` means that the run had trained before the attempt began: a denial of the
    bucket is then an outage. A local replica also gets a fair share of the CPU cores.
    """
    trained_at = run.first_step_at
    has_trained = trained_at is not None and trained_at < attempt.created_at
    env = {RUN_HAS_TRAINED: "1"} if has_trained else {}
    if remote:
        return env
    threads = max(1, (os.cpu_count() or 1) // max(1, run.replicas.count()))
    return env | {"OMP_NUM_THREADS": str(threads)}


def _wait_for_intervention(attempt: ReplicaAttempt, error: Exception) -> None:
    """Open the pool's circuit breaker; the replica relaunches after an operator has acted."""
    circuit_breaker.require_intervention(attempt.replica.pool, str(error))
    _refuse(attempt, error, to=ReplicaState.RESTARTING)


def _refuse(
    attempt: ReplicaAttempt, error: Exception, *, to: ReplicaState = ReplicaState.FAILED
) -> None:
    """End an attempt that cannot be completed, and cancel its job, if any. If that fails, the
    reaper ends the job. If an operator can fix the cause, the replica waits (``to`` is RESTARTING)
    and relaunches automatically."""
    with transaction.atomic():
        ended = ReplicaAttempt.objects.filter(pk=attempt.pk, ended_at=None).update(
            ended_at=timezone.now(), cause=retry_policy.REFUSED, message=clean_text(str(error))
        )
        replica = Replica.objects.select_related("run").get(pk=attempt.replica_id)
        if ended and replica.state == ReplicaState.PROVISIONING:
            reason = f"{attempt.launch_key} could not be launched: {error}"
            transition_replica(replica, to, reason=reason)
    if attempt.handle is None:
        return
    pool = attempt.replica.pool
    try:
        executor_for(pool).cancel([ReplicaHandle(**attempt.handle)])
    except ExecutorError as error:
        logger.warning("%s: the request to end %s failed: %s", pool, attempt.launch_key, error)
