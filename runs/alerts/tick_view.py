"""Build the view that alert rules are evaluated on from one tick of a run.

A tick usually costs one query for this; those about rounds are added after a round was committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

from runs.alerts.alert_view import AlertView, IngestView, PoolView, ReplicaView, RoundsView
from runs.alerts.rules import RECENT, SPIKE_WINDOW, STALE
from runs.json_values import finite
from runs.metrics import round_strips
from runs.metrics.changes import Changes
from runs.models import (
    Alert,
    Contribution,
    IngestState,
    Replica,
    ReplicaAttempt,
    Round,
    Run,
    TelemetryCursor,
)
from runs.states import RUN_ENDED, ReplicaState, RoundState, RunState


class AlertContext(Protocol):
    """The part of :class:`runs.reconcile.context.ReconcileContext` that alert rules need."""

    run: Run
    now: datetime
    replicas: list[Replica]
    ingest: IngestState | None
    changes: Changes

    @property
    def open_by_replica(self) -> dict[int, ReplicaAttempt]: ...

    @property
    def unknown_since(self) -> datetime | None: ...


def alert_view(tick: AlertContext, known: Mapping[tuple[str, str], Alert]) -> AlertView:
    """The view of a tick. ``known`` are the open alerts by kind and subject."""
    run, now = tick.run, tick.now
    state = RunState(run.state)
    if state in RUN_ENDED:
        return AlertView(
            state=state,
            reason=run.state_reason,
            committed=run.committed_rounds,
            total=run.total_rounds,
        )
    pools = {replica.pool_id: replica.pool for replica in tick.replicas}
    began = run.started_at or run.created_at
    return AlertView(
        state=state,
        reason=run.state_reason,
        quorum=run.settings.min_quorum,
        target=sum(pool.count for pool in pools.values()),
        training=run.first_step_at is not None,
        replicas=_replicas(tick, _nonfinite(run) if _has_nonfinite(tick, known) else frozenset()),
        pools=_pools(tick),
        ingest=_ingest(tick),
        rounds=_rounds(run, len(tick.replicas)) if _has_new_rounds(tick) else None,
        low_goodput=("goodput", "") in known,
        cost_usd=run.cost_usd,
        budget_usd=run.budget_usd,
        age_s=(now - began).total_seconds() - run.idle_s,
        time_limit_s=run.time_limit_s,
        committed=run.committed_rounds,
        total=run.total_rounds,
    )


def _ingest(tick: AlertContext) -> IngestView:
    state = tick.ingest
    if state is None:
        return IngestView()
    unread_since = None
    if tick.unknown_since is not None and state.trouble != state.Trouble.FAILED:
        unread_since = state.trouble_since
    lag_s = 0.0
    began = state.caught_up_at or state.begun_at
    if began is not None and state.trouble in ("", state.Trouble.FAILED):
        lag_s = max((tick.now - began).total_seconds(), 0.0)
    return IngestView(
        unread_since=unread_since,
        unread_because=state.message,
        quarantined=state.quarantined,
        lag_s=lag_s,
    )


def _pools(tick: AlertContext) -> tuple[PoolView, ...]:
    pools = {replica.pool_id: replica.pool for replica in tick.replicas}
    return tuple(
        PoolView(id=pk, name=str(pool), last_error=pool.last_error)
        for pk, pool in sorted(pools.items())
        if pool.requires_intervention
    )


def _replicas(tick: AlertContext, nonfinite: frozenset[tuple[int, str]]) -> tuple[ReplicaView, ...]:
    jobs = tick.open_by_replica
    views = []
    for replica in tick.replicas:
        job = jobs.get(replica.pk)
        left_s = granted_s = None
        if job is not None and job.deadline_at is not None and job.launched_at is not None:
            left_s = (job.deadline_at - tick.now).total_seconds()
            granted_s = (job.deadline_at - job.launched_at).total_seconds()
        views.append(
            ReplicaView(
                number=replica.number,
                state=ReplicaState(replica.state),
                reason=replica.state_reason,
                fell=_fell(replica),
                nonfinite=(replica.pk, replica.incarnation) in nonfinite,
                left_s=left_s,
                granted_s=granted_s,
            )
        )
    return tuple(views)


def _has_new_rounds(tick: AlertContext) -> bool:
    """Whether rounds were committed since the last evaluation, also by a tick that was killed."""
    return bool(tick.changes.rounds) or tick.run.watched_round < tick.run.committed_rounds


_RELAUNCHING = (ReplicaState.RESTARTING, ReplicaState.PROVISIONING)


def _fell(replica: Replica) -> bool:
    """Whether a replica is relaunched because its job was lost or failed, and not on request.

    See :func:`runs.reconcile.replicas.relaunch`.
    """
    return replica.fell_at is not None and replica.state in _RELAUNCHING


def _has_nonfinite(tick: AlertContext, known: Mapping[tuple[str, str], Alert]) -> bool:
    """Whether a loss can be NaN or infinite; also while an alert about one is open."""
    reported = tick.ingest is not None and tick.ingest.nonfinite
    return reported or any(kind == "nan" for kind, _ in known)


def _nonfinite(run: Run) -> frozenset[tuple[int, str]]:
    """(replica ID, incarnation) of the processes that reported a loss that is not finite."""
    cursors = TelemetryCursor.objects.filter(replica__run=run, nonfinite=True)
    return frozenset(cursors.values_list("replica_id", "incarnation"))


def _rounds(run: Run, replicas: int) -> RoundsView:
    """The newest rounds. Three queries, limited by :data:`RECENT` and :data:`SPIKE_WINDOW`."""
    committed = Round.objects.filter(run=run, state=RoundState.COMMITTED).order_by("-number")
    losses = committed.exclude(loss=None).values_list("number", "loss")[: SPIKE_WINDOW + 1]
    recent = list(reversed(committed[:RECENT]))
    late, spent, compute = [], 0.0, 0.0
    for row in recent:
        size = max(replicas, len(row.outcomes))
        outcomes, timings = round_strips.unpack(bytes(row.outcomes), bytes(row.timings), size)
        missed = (outcomes == round_strips.OUTCOMES.index("late")).nonzero()[0]
        late.append(frozenset(int(number) for number in missed))
        spent += float(timings["phases"].sum())
        compute += float(timings["phases"][:, list(round_strips.GROUPS).index("compute")].sum())
    enough = len(recent) == RECENT and spent > 0
    return RoundsView(
        losses=tuple((number, loss) for number, loss in reversed(losses) if loss is not None),
        late=tuple(late),
        stale=_stale(recent[-1]) if recent else {},
        mismatch=tuple(row.number for row in recent if row.digest_mismatch),
        goodput=finite(compute / spent) if enough else None,
    )


def _stale(row: Round) -> dict[int, int]:
    old = Contribution.objects.filter(round=row, base_round__lt=row.number - STALE)
    rows = old.values_list("replica__number", "base_round")
    return {number: row.number - 1 - base for number, base in rows}
