"""Alerts, kept: one row per run, kind and subject, opened, closed, opened again.

What is the case is :func:`runs.alerts.rules.judge`'s to say, once in every tick. Here it meets
the table, with conditional writes: who opens a row tells of it (:func:`tell`), and a row that comes
back within :data:`COOL_DOWN` of being told is opened without telling, still acknowledged, so that
what flaps does not ring. A tick costs one query more; those about rounds come when one was
committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Protocol

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from runs.alerts import webhooks
from runs.alerts.rules import (
    KINDS,
    RECENT,
    SPIKE_WINDOW,
    STALE,
    AlertView,
    Finding,
    PoolView,
    ReplicaView,
    RoundsView,
    Verdict,
    judge,
)
from runs.json_values import finite, iso
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
from runs.times import has_passed
from runs.transitions import clean_text, record_event

COOL_DOWN = timedelta(minutes=15)

WITH_EVENT = frozenset({"spike", "goodput", "budget", "deadline", "ingest_lag"})
"""Kinds that no event tells of otherwise."""

LISTED = 200
"""Rows that a page shows, newest first."""


class TickView(Protocol):
    """What alert rules need of one tick of a run (:class:`runs.reconcile.context.Tick`)."""

    run: Run
    now: datetime
    replicas: list[Replica]
    ingest: IngestState | None
    changes: Changes

    @property
    def open_by_replica(self) -> dict[int, ReplicaAttempt]: ...

    @property
    def unknown_since(self) -> datetime | None: ...


def watch(tick: TickView) -> None:
    """Judge the run as this tick leaves it. The end of a run is judged once."""
    run, now = tick.run, tick.now
    if run.state in RUN_ENDED and not run.end_due and run.watched_round == run.committed_rounds:
        return
    known = {(a.kind, a.subject): a for a in Alert.objects.filter(run=run, closed_at=None)}
    view = _view(tick, known)
    verdict = judge(view)
    if _stands(verdict, known) and not _untold(run, view):
        return
    with transaction.atomic():  # who is killed in between has opened nothing, and it is done again
        opened = keep(run, verdict, known, replicas=tick.replicas, now=now)
        for alert in opened:
            if alert.told_at == alert.opened_at:
                tell(alert)
        if untold := _untold(run, view):
            Run.objects.filter(pk=run.pk, state=run.state).update(**untold)
            for name, value in untold.items():
                setattr(run, name, value)
    tick.changes.run |= bool(opened) or any(a.closed_at is not None for a in known.values())


def _stands(verdict: Verdict, known: dict[tuple[str, str], Alert]) -> bool:
    """Whether nothing is to be opened or closed."""
    found = {(f.kind, f.subject) for f in verdict.findings}
    return found <= known.keys() and all(key in found or verdict.stays(*key) for key in known)


def _untold(run: Run, view: AlertView) -> dict[str, Any]:
    """Fields that say what need not be judged once more: an end, and rounds."""
    fields: dict[str, Any] = {}
    if run.end_due and view.state in RUN_ENDED:
        fields["end_due"] = False
    judged = view.rounds is not None or view.state in RUN_ENDED  # of an end, nothing but the end
    if judged and run.watched_round != run.committed_rounds:
        fields["watched_round"] = run.committed_rounds
    return fields


def tell(alert: Alert) -> None:
    """Whatever is told outside of a newly opened alert is told from here."""
    if alert.kind in WITH_EVENT:
        record_event(
            alert.run, "alert", f"{KINDS[alert.kind]}: {alert.message}",
            level=alert.level, replica=alert.replica,
        )  # fmt: skip
    webhooks.announce(alert)


def keep(
    run: Run,
    verdict: Verdict,
    known: dict[tuple[str, str], Alert],
    *,
    replicas: Iterable[Replica] = (),
    now: datetime,
) -> list[Alert]:
    """Open what was found and is not open, close what is not the case any more; those opened.
    ``known`` are the open ones; the closed have their ``closed_at`` set."""
    found = {(f.kind, f.subject): f for f in verdict.findings}
    ids = {replica.number: replica.pk for replica in replicas}
    opened = []
    for key, finding in found.items():
        if key in known:
            continue
        alert = _open(
            run, finding, ids.get(finding.replica) if finding.replica is not None else None, now
        )
        if alert is not None:
            opened.append(alert)
    for key, alert in known.items():
        if key in found or verdict.stays(*key):
            continue
        if Alert.objects.filter(pk=alert.pk, closed_at=None).update(closed_at=now):
            alert.closed_at = now
    return opened


def _open(run: Run, finding: Finding, replica_id: int | None, now: datetime) -> Alert | None:
    """The row, if it was us who opened it. What is over at once is closed as it is opened."""
    ends = finding.kind == "finished"
    if ends:  # this very end, whenever and however often it is looked at
        now = run.state_since
    over = now if ends else None
    message = clean_text(finding.message)
    alert, made = Alert.objects.get_or_create(
        run=run,
        kind=finding.kind,
        subject=finding.subject,
        defaults={
            "replica_id": replica_id, "level": finding.level, "message": message,
            "first_at": now, "opened_at": now, "closed_at": over, "told_at": now,
        },
    )  # fmt: skip
    if made:
        return alert
    if ends and alert.opened_at == run.state_since:
        return None
    again: dict[str, Any] = {
        "replica_id": replica_id, "level": finding.level, "message": message,
        "opened_at": now, "closed_at": over, "times": F("times") + 1,
    }  # fmt: skip
    cooled = alert.told_at is None or has_passed(alert.told_at, COOL_DOWN, now)
    quiet = not ends and not cooled
    if not quiet:
        again |= {"told_at": now, "acknowledged_at": None, "acknowledged_by": None}
    seen = Q(pk=alert.pk, closed_at__isnull=False, times=alert.times)
    if not Alert.objects.filter(seen).update(**again):
        return None
    alert.refresh_from_db()
    return alert


def acknowledge(alert: Alert, *, actor: User) -> bool:
    """Somebody has seen it and looks after it. False if somebody had before."""
    with transaction.atomic():
        moved = Alert.objects.filter(pk=alert.pk, acknowledged_at=None).update(
            acknowledged_at=timezone.now(), acknowledged_by=actor
        )
        if moved:
            record_event(
                alert.run, "alert", f"acknowledged: {KINDS.get(alert.kind, alert.kind)}: "
                f"{alert.message}", replica=alert.replica, actor=actor,
            )  # fmt: skip
    return bool(moved)


def alert_rows(run: Run) -> list[dict[str, Any]]:
    """Open ones first, then newest first. One query."""
    rows = Alert.objects.filter(run=run).select_related("replica", "acknowledged_by")
    newest = rows.order_by(F("closed_at").desc(nulls_first=True), "-opened_at", "-id")[:LISTED]
    return [
        {
            "id": a.pk,
            "kind": a.kind,
            "title": KINDS.get(a.kind, a.kind),
            "subject": a.subject,
            "replica": a.replica.number if a.replica else None,
            "level": a.level,
            "message": a.message,
            "first_at": iso(a.first_at),
            "opened_at": iso(a.opened_at),
            "closed_at": iso(a.closed_at),
            "times": a.times,
            "acknowledged_at": iso(a.acknowledged_at),
            "acknowledged_by": a.acknowledged_by.get_username() if a.acknowledged_by else None,
        }
        for a in newest
    ]


# What a tick has seen, as the judge reads it.


def _view(tick: TickView, known: dict[tuple[str, str], Alert]) -> AlertView:
    run, now = tick.run, tick.now
    state = RunState(run.state)
    if state in RUN_ENDED:
        return AlertView(
            state=state, reason=run.state_reason,
            committed=run.committed_rounds, total=run.total_rounds,
        )  # fmt: skip
    pools = {replica.pool_id: replica.pool for replica in tick.replicas}
    began = run.started_at or run.created_at
    return AlertView(
        state=state,
        reason=run.state_reason,
        quorum=int(run.group_settings["min_quorum"]),
        target=sum(pool.count for pool in pools.values()),
        training=run.first_step_at is not None,
        replicas=_replicas(tick, _nonfinite(run) if _has_nonfinite(tick, known) else frozenset()),
        pools=_pools(tick),
        **_of_ingest(tick),
        rounds=_rounds(run, len(tick.replicas)) if _has_new_rounds(tick) else None,
        low_goodput=("goodput", "") in known,
        cost_usd=run.cost_usd,
        budget_usd=run.budget_usd,
        age_s=(now - began).total_seconds() - run.idle_s,
        time_limit_s=run.time_limit_s,
        committed=run.committed_rounds,
        total=run.total_rounds,
    )


def _of_ingest(tick: TickView) -> dict[str, Any]:
    state = tick.ingest
    if state is None:
        return {}
    unread_since = None
    if tick.unknown_since is not None and state.trouble != state.Trouble.FAILED:
        unread_since = state.trouble_since
    lag_s = 0.0
    began = state.caught_up_at or state.begun_at
    if began is not None and state.trouble in ("", state.Trouble.FAILED):
        lag_s = max((tick.now - began).total_seconds(), 0.0)
    return {
        "unread_since": unread_since,
        "unread_because": state.message,
        "quarantined": state.quarantined,
        "ingest_lag_s": lag_s,
    }


def _pools(tick: TickView) -> tuple[PoolView, ...]:
    pools = {replica.pool_id: replica.pool for replica in tick.replicas}
    return tuple(
        PoolView(id=pk, name=str(pool), trouble=pool.trouble)
        for pk, pool in sorted(pools.items())
        if pool.needs_person
    )


def _replicas(tick: TickView, nonfinite: frozenset[tuple[int, str]]) -> tuple[ReplicaView, ...]:
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


def _has_new_rounds(tick: TickView) -> bool:
    """Also those that a tick has read and was killed before it could judge."""
    return bool(tick.changes.rounds) or tick.run.watched_round < tick.run.committed_rounds


_ON_THE_WAY_BACK = (ReplicaState.RESTARTING, ReplicaState.PROVISIONING)


def _fell(replica: Replica) -> bool:
    """Whether it restarts after a fall, and not because it was asked to; see
    :func:`runs.reconcile.replicas.relaunch`."""
    return replica.fell_at is not None and replica.state in _ON_THE_WAY_BACK


def _has_nonfinite(tick: TickView, known: Mapping[tuple[str, str], Alert]) -> bool:
    """Whether a loss can be no number; also while an alert about one is open."""
    reported = tick.ingest is not None and tick.ingest.nonfinite
    return reported or any(kind == "nan" for kind, _ in known)


def _nonfinite(run: Run) -> frozenset[tuple[int, str]]:
    """(replica, incarnation) that have reported a loss which is no number."""
    cursors = TelemetryCursor.objects.filter(replica__run=run, nonfinite=True)
    return frozenset(cursors.values_list("replica_id", "incarnation"))


def _rounds(run: Run, replicas: int) -> RoundsView:
    """Three queries, of as many rows as :data:`RECENT` and :data:`SPIKE_WINDOW` say."""
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
    whole = len(recent) == RECENT and spent > 0
    return RoundsView(
        losses=tuple((number, loss) for number, loss in reversed(losses) if loss is not None),
        late=tuple(late),
        stale=_stale(recent[-1]) if recent else {},
        mismatch=tuple(row.number for row in recent if row.digest_mismatch),
        goodput=finite(compute / spent) if whole else None,
    )


def _stale(row: Round) -> dict[int, int]:
    old = Contribution.objects.filter(round=row, base_round__lt=row.number - STALE)
    found = old.values_list("replica__number", "base_round")
    return {number: row.number - 1 - base for number, base in found}
