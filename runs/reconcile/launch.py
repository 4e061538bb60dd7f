"""From a queued run to jobs on backends.

Record the intent, act, record the result: the group's fingerprint is in the database before
``group.json`` is in the bucket, an attempt's launch key is in the database before a backend hears
of it. Whatever dies in between, doing it all again finds what was done: ``group.json`` and the
bundle are create-once, and a backend knows a job by its launch key.

Here are the steps; :mod:`runs.tasks` delivers them, maybe twice, and
:mod:`runs.reconcile.reconciler` calls for the ones that got lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

from django.db import connections, transaction
from django.db.models import Q
from django.utils import timezone

from diloco.protocol import keys, ownership
from diloco.protocol.group_document import (
    GROUP_LIMIT,
    GroupDocument,
    ProtocolMismatch,
    fingerprint_of,
)
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.store.base import (
    MissingKey,
    ObjectTooLarge,
    Store,
    StoreDenied,
    StoreUnavailable,
)
from diloco.store.retry import RUN_HAS_TRAINED
from executors.base import (
    CodeRef,
    ExecutorError,
    LaunchRefused,
    NeedsPerson,
    NoCapacity,
    ReplicaHandle,
    ReplicaSpec,
    RetryLater,
    ServerlessExecutor,
)
from runs.backends import circuit_breaker, prices
from runs.backends.code_bundle import make_bundle
from runs.backends.executors import executor_for
from runs.backends.requirements import replica_requirements
from runs.credentials import replica_secrets
from runs.credentials.restrictions import refused_by_credential
from runs.exceptions import LaunchFailed, LaunchLater
from runs.ingest.commands import send_resume
from runs.ingest.stores import store_for
from runs.local_access import refused_by_owner
from runs.models import Replica, ReplicaAttempt, Run
from runs.reconcile import retry_policy
from runs.reconcile.pending import note_no_capacity
from runs.reconcile.retry_policy import REFUSED
from runs.states import RUN_ENDED, RUN_LIVE, ReplicaState, RunState
from runs.submit.clone_and_fork import plant_fork
from runs.task_queue import enqueue
from runs.times import is_due
from runs.transitions import clean_text, record_event, transition, transition_replica

logger = logging.getLogger(__name__)

ENTRYPOINT = "diloco.replica"
RANK_ENV = "REPLICA_RANK"
GIVE_UP_AFTER = timedelta(minutes=10)
"""How long a backend or a bucket that is away is tried before the launch has failed."""

THREADS = 16
"""Launches of one pool at once."""

_TO_LAUNCH = (ReplicaState.PENDING, ReplicaState.PROVISIONING, ReplicaState.RESTARTING)
_LAUNCHABLE = RUN_LIVE | {RunState.PROVISIONING}


def group_document(run: Run, code_sha256: str) -> GroupDocument:
    return GroupDocument(
        run_id=str(run.pk),
        name=run.name,
        settings=GroupSettings.from_dict(run.group_settings),
        workload=run.workload,
        code=code_sha256,
    )


def launch_run(run_id: str) -> None:
    """Write group and code into the rendezvous and call for every pending replica.

    Done twice it changes nothing. Raises :class:`LaunchLater` when the bucket is away.
    """
    run = Run.objects.get(pk=run_id)
    if run.state == RunState.QUEUED:
        try:
            store = store_for(run)
            publish_group(run, store)
            if run.resumed_at is not None:
                take_up(run, store)
        except (StoreUnavailable, LaunchFailed, StoreDenied, SettingsError) as error:
            if _is_outage(run, error) and timezone.now() - run.state_since <= GIVE_UP_AFTER:
                raise LaunchLater(str(error)) from error
            where = "" if run.rendezvous in str(error) else f"{run.rendezvous}: "
            _out_of_the_queue(run, RunState.FAILED, f"could not be launched: {where}{error}")
            return
        _out_of_the_queue(run, RunState.PROVISIONING, "group and code are in the rendezvous")
    if run.state == RunState.PROVISIONING:
        for pool in run.pools.all():
            enqueue("launch_pool", pool.pk)


def _is_outage(run: Run, error: Exception) -> bool:
    """Whether trying again can help: a bucket that denies what it permitted while the run trained
    was misconfigured meanwhile."""
    denied_again = isinstance(error, StoreDenied) and run.first_step_at is not None
    return isinstance(error, StoreUnavailable) or denied_again


def _out_of_the_queue(run: Run, to: RunState, reason: str) -> None:
    if run.state == RunState.QUEUED:  # it was read again: somebody may have stopped it
        transition(run, to, reason=reason)


def publish_group(run: Run, store: Store) -> None:
    """The prefix's marker, ``code/<sha>.zip``, and ``group.json``, all create-once.

    Raises :class:`LaunchFailed` when there is a ``group.json`` that is not this run's, or without
    one anything else that is not.
    """
    found = _existing_group(store)
    if found is None:
        _claim(run, store, ownership.claim)
        bundle = make_bundle()
        document = group_document(run, bundle.sha256)
        Run.objects.filter(pk=run.pk, state=RunState.QUEUED).update(
            code_sha256=bundle.sha256, group_fingerprint=document.fingerprint
        )
        store.create(keys.code_bundle(bundle.sha256), bundle.data)
        if run.archive is not None:
            store.create(keys.code_bundle(run.archive.sha256), bytes(run.archive.data))
        plant_fork(run, store, now=timezone.now())
        if not store.create(keys.GROUP, document.to_bytes()):
            found = _existing_group(store)
    run.refresh_from_db()
    if found is None:
        return
    expected = group_document(run, run.code_sha256)
    if found != expected.to_bytes():
        raise LaunchFailed(_difference(store.uri, expected, found))
    _claim(run, store, ownership.mark)  # of a run that was launched before there were markers


def _claim(run: Run, store: Store, make: Callable[[Store, str], None]) -> None:
    try:
        make(store, str(run.pk))
    except ownership.PrefixTaken as error:
        raise LaunchFailed(str(error)) from None


def take_up(run: Run, store: Store) -> None:
    """Have a run that was paused or over go on in its own rendezvous.

    Raises :class:`LaunchFailed` where final weights lie: replicas would take the run for over.
    """
    with contextlib.suppress(MissingKey):
        store.get_range(keys.FINAL_MANIFEST, 0, 1)
        raise LaunchFailed(
            f"{run.rendezvous}: expected no {keys.FINAL_MANIFEST}, found one: what is final does "
            "not change; fork a new run from its newest checkpoint"
        )
    send_resume(run, store, timezone.now())


def _existing_group(store: Store) -> bytes | None:
    try:
        return store.get(keys.GROUP, limit=GROUP_LIMIT)
    except MissingKey:
        return None
    except ObjectTooLarge as error:
        raise LaunchFailed(f"{store.uri}: expected {keys.GROUP} of this run: {error}") from None


def _difference(uri: str, expected: GroupDocument, found: bytes) -> str:
    try:
        other = GroupDocument.from_bytes(found)
    except (SettingsError, ProtocolMismatch) as error:
        return f"{uri}: expected no {keys.GROUP} or this run's, found one that is not: {error}"
    if other.run_id != expected.run_id:
        return (
            f"{uri}: expected a rendezvous of its own for run {expected.run_id}, "
            f"found {keys.GROUP} of run {other.run_id} ({other.name!r})"
        )
    return (
        f"{uri}: expected {keys.GROUP} with fingerprint {expected.fingerprint}, "
        f"found {other.fingerprint}"
    )


def launch_key(run: Run, replica: Replica, attempt: int) -> str:
    return f"{run.pk.hex[:12]}-{replica.number}-{attempt}"


def launch_pool(pool_id: int, *, threads: int = THREADS) -> None:
    """Start what waits to be started in the pool, many at once: a backend may take seconds for
    each, and one that hangs must not keep every worker busy.

    Raises :class:`LaunchLater` when some could not be launched now.
    """
    waiting = Replica.objects.filter(pool_id=pool_id, state__in=_TO_LAUNCH)
    with ThreadPoolExecutor(threads, thread_name_prefix="launch") as pool:
        done = [pool.submit(_launch_in_thread, pk) for pk in waiting.values_list("pk", flat=True)]
    later = [str(f.exception()) for f in done if isinstance(f.exception(), LaunchLater)]
    for future in done:
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
    """Start the replica's next attempt, or complete one that was begun. Done twice, one job.

    An attempt is complete only when the executor's ``ensure`` has returned: a job that was found
    meanwhile can lack its Secret.

    Raises :class:`LaunchLater` when the backend or the bucket is away.
    """
    attempt = _begin_attempt(replica_id)
    if attempt is None:
        return
    replica = attempt.replica
    run = replica.run
    pool = replica.pool
    try:
        if problem := refused_by_credential(pool) or refused_by_owner(pool, run):
            raise NeedsPerson(problem)
        executor = executor_for(pool)
        handle = _ensure(executor, run, attempt)
    except NeedsPerson as error:
        circuit_breaker.call_person(pool, str(error))
        refuse_attempt(attempt, str(error), to=ReplicaState.RESTARTING)
        _cancel_refused(attempt)
        return
    except (LaunchRefused, LaunchFailed, MissingKey) as error:
        refuse_attempt(attempt, str(error))
        _cancel_refused(attempt)
        return
    except (RetryLater, StoreUnavailable, StoreDenied) as error:
        if isinstance(error, StoreDenied) and not _is_outage(run, error):
            refuse_attempt(attempt, str(error))
            _cancel_refused(attempt)
            return
        if isinstance(error, NoCapacity) and error.attempts is None:
            circuit_breaker.wait_for_capacity(pool, str(error), after_s=error.after_s)
        elif isinstance(error, RetryLater):
            circuit_breaker.count_failure(pool, str(error), after_s=error.after_s)
            if error.attempts is not None and pool.failures >= error.attempts:
                circuit_breaker.call_person(pool, str(error))
                refuse_attempt(attempt, str(error), to=ReplicaState.RESTARTING)
                _cancel_refused(attempt)
                return
        if isinstance(error, NoCapacity):
            note_no_capacity(replica, error, timezone.now())
            raise LaunchLater(str(error)) from error
        # A job that exists has its own limit: see runs.reconcile.pending.
        if attempt.handle is None and timezone.now() - attempt.created_at > GIVE_UP_AFTER:
            # A run that works waits for a backend that is away, as long as the breaker says.
            waits = run.state in RUN_LIVE
            to = ReplicaState.RESTARTING if waits else ReplicaState.FAILED
            refuse_attempt(attempt, str(error), to=to)
            return
        Replica.objects.filter(pk=replica.pk, state=ReplicaState.PROVISIONING).update(
            state_reason=clean_text(f"{attempt.launch_key} was not launched yet: {error}")
        )
        raise LaunchLater(str(error)) from error
    complete_attempt(attempt, handle)
    run.refresh_from_db()
    if run.state in RUN_ENDED or ReplicaAttempt.objects.filter(
        pk=attempt.pk, ended_at__isnull=False
    ):
        # It was called off while the backend was starting it.
        executor.cancel([handle])


def _begin_attempt(replica_id: int) -> ReplicaAttempt | None:
    """The attempt to launch now, its key written down; None when there is nothing to do."""
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
            if circuit_breaker.is_closed(replica.pool, timezone.now()):
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
        if not circuit_breaker.may_launch(replica.pool, timezone.now()):
            return None
        if not prices.may_launch(replica.pool):
            return None
        number = last.number + 1 if last else 1
        attempt = ReplicaAttempt.objects.create(
            replica=replica,
            number=number,
            launch_key=launch_key(run, replica, number),
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


def _ensure(executor: ServerlessExecutor, run: Run, attempt: ReplicaAttempt) -> ReplicaHandle:
    replica, pool = attempt.replica, attempt.replica.pool
    bundle = keys.code_bundle(run.code_sha256)
    store = store_for(run)
    _check_group(run, store)
    try:
        store.get_range(bundle, 0, 1)
    except MissingKey as error:
        place = f"{run.rendezvous}/{bundle}"
        raise LaunchFailed(f"expected the code bundle at {place}, found nothing") from error
    lifetime_s = pool.timeout_s or executor.capabilities.max_lifetime_s
    opened = replica_secrets(run, replica, lifetime_s=lifetime_s)
    spec = ReplicaSpec(
        launch_key=attempt.launch_key,
        replica=replica.number,
        hardware=pool.hardware,
        region=pool.region,
        spot=pool.spot,
        timeout_s=lifetime_s,
        image=pool.image,
        labels={"archipelago-run": run.pk.hex},
        secrets=opened.environment,
        options=pool.options,
    )
    ReplicaAttempt.objects.filter(pk=attempt.pk).update(
        price_usd_h=pool.price_usd_h,
        cost_usd=None if pool.price_usd_h is None else attempt.cost_usd or 0.0,
        deadline_at=_from_now(lifetime_s),
        expires_at=_expiry(attempt, opened.lifetime_s),
    )
    [handle] = executor.ensure(
        [spec],
        ENTRYPOINT,
        {"args": [run.rendezvous], "rank_env": RANK_ENV},
        env=replica_env(run, remote=executor.capabilities.remote, attempt=attempt),
        code=code_of(run, remote=executor.capabilities.remote),
    )
    return handle


def _check_group(run: Run, store: Store) -> None:
    """:class:`LaunchFailed` unless ``group.json`` is what it was when the run was launched: a
    replica does whatever it says. A read that arrives damaged is repeated."""
    if not run.group_fingerprint:
        return
    found = ""
    for _ in range(2):
        data = _existing_group(store)
        if data is None:
            raise LaunchFailed(f"{store.uri}: expected {keys.GROUP}, found none")
        found = fingerprint_of(data)
        if found == run.group_fingerprint:
            return
    raise LaunchFailed(
        f"{store.uri}: expected {keys.GROUP} with fingerprint {run.group_fingerprint}, as it was "
        f"when the run was launched; found {found or 'a document that cannot be read'}"
    )


def _expiry(attempt: ReplicaAttempt, lifetime_s: float | None) -> datetime | None:
    """When the job's credentials end. A job that exists can have those of an earlier call."""
    if attempt.handle is not None and attempt.expires_at is not None:
        return attempt.expires_at
    return _from_now(lifetime_s)


def _from_now(seconds: float | None) -> datetime | None:
    return None if seconds is None else timezone.now() + timedelta(seconds=seconds)


def code_of(run: Run, *, remote: bool) -> CodeRef:
    """What a replica fetches before it starts. A machine of our own has what the image of another
    must be given."""
    return CodeRef(
        uri=run.rendezvous,
        sha256=run.code_sha256,
        archives=(run.archive_id,) if run.archive_id else (),
        requirements=replica_requirements(run, remote=remote),
    )


def replica_env(run: Run, *, remote: bool, attempt: ReplicaAttempt) -> dict[str, str]:
    """Whether the run had trained when the attempt began: then a denial of the bucket is an outage.
    Here, a fair share of this machine's cores. Nothing about the group."""
    trained_at = run.first_step_at
    has_trained = trained_at is not None and trained_at < attempt.created_at
    env = {RUN_HAS_TRAINED: "1"} if has_trained else {}
    if remote:
        return env
    threads = max(1, (os.cpu_count() or 1) // max(1, run.replicas.count()))
    return env | {"OMP_NUM_THREADS": str(threads)}


def complete_attempt(attempt: ReplicaAttempt, handle: ReplicaHandle) -> bool:
    """Record that ``ensure`` has returned: every object of the job exists. False if it was recorded
    before."""
    incomplete = ReplicaAttempt.objects.filter(Q(launched_at=None) | Q(handle=None), pk=attempt.pk)
    saved = incomplete.update(handle=json.loads(handle.to_json()), launched_at=timezone.now())
    if saved:
        done = "launched" if attempt.handle is None else "completed"
        record_event(
            attempt.replica.run, "job", f"{attempt.launch_key} {done}", replica=attempt.replica
        )
    return bool(saved)


def save_handle(attempt: ReplicaAttempt, handle: ReplicaHandle) -> bool:
    """Record a job that was found by its launch key. It can be incomplete, so the launch goes on.
    False if it was recorded before."""
    saved = ReplicaAttempt.objects.filter(pk=attempt.pk, handle__isnull=True).update(
        handle=json.loads(handle.to_json())
    )
    return bool(saved)


def _cancel_refused(attempt: ReplicaAttempt) -> None:
    """End a job of an attempt that cannot be completed. The reaper ends it if this fails."""
    if attempt.handle is None:
        return
    pool = attempt.replica.pool
    try:
        executor_for(pool).cancel([ReplicaHandle(**attempt.handle)])
    except ExecutorError as error:
        logger.warning("%s could not be asked to end %s: %s", pool, attempt.launch_key, error)


def refuse_attempt(
    attempt: ReplicaAttempt, message: str, *, to: ReplicaState = ReplicaState.FAILED
) -> None:
    """The backend will not have it: the attempt is over before it began. Where a person can mend
    that, the replica waits (``to`` restarting) and goes on by itself afterwards."""
    with transaction.atomic():
        now = timezone.now()
        ended = ReplicaAttempt.objects.filter(pk=attempt.pk, ended_at=None).update(
            ended_at=now, cause=REFUSED, message=clean_text(message)
        )
        replica = Replica.objects.select_related("run").get(pk=attempt.replica_id)
        if ended and replica.state == ReplicaState.PROVISIONING:
            transition_replica(
                replica,
                to,
                reason=f"{attempt.launch_key} could not be launched: {message}",
            )
