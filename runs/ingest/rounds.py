"""Rounds and contributions, read from the bucket's own log.

Commits are read by cursor: GET the next round's commit until there is none. A round's row and the
cursor move in one transaction under ``WHERE next_round = r``, so a commit is counted once however
often a tick is repeated or killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from django.db import transaction
from django.db.models import F, Q

from diloco.protocol import keys
from diloco.protocol.records import (
    BadRecord,
    Commit,
    ContributionRecord,
    Plan,
    Record,
)
from diloco.store.base import ListingTooLong, MissingKey, Store
from runs.ingest.limits import finite
from runs.ingest.round_pace import Before, commit_before, smoothed
from runs.ingest.segments import date_evaluation
from runs.ingest.validation import check_record, refuse, wall
from runs.log_context import about
from runs.metrics import healing, round_strips
from runs.metrics.changes import Changes
from runs.metrics.downsampling import add_points
from runs.models import Contribution, Event, Replica, Round, Run
from runs.states import ContributionState, RoundState
from runs.transitions import clean_text, record_event

R = TypeVar("R", bound=Record)

COMMITS_PER_TICK = 50
CONTRIBUTIONS_LISTED = 20_000
"""Objects of a round that are listed: a group of a thousand has two thousand. Of a round with more,
the contributions that its plan names are read."""
REFUSALS_NAMED = 20
"""Events of one round about contributions that its plan refuses. A plan of a megabyte can name ten
thousand."""


@dataclass(frozen=True, kw_only=True)
class RoundRecords:
    """What the bucket holds of one round; ``bad`` are records that were unreadable."""

    number: int
    commit: Commit | None = None
    plan: Plan | None = None
    contributions: tuple[ContributionRecord, ...] = ()
    bad: tuple[tuple[str, BadRecord], ...] = ()
    commit_refused: str = ""


def ingest_rounds(
    run: Run,
    store: Store,
    *,
    now: datetime,
    changes: Changes,
    resumed: Sequence[datetime] | None = None,
) -> bool:
    """All new commits (at most :data:`COMMITS_PER_TICK`), then what there is of the open round.
    False when there may be more of them.

    ``resumed`` is when the run was sent on after a pause or an end; left out, the last time, which
    is enough for rounds that are read as they come.
    """
    if resumed is None:
        resumed = [run.resumed_at] if run.resumed_at else []
    replicas = {r.number: r for r in Replica.objects.filter(run=run)}
    for _ in range(COMMITS_PER_TICK):
        with about(round=run.next_round):
            if not _ingest_next(run, store, replicas, now, changes, resumed):
                return True
    return False


def _ingest_next(
    run: Run,
    store: Store,
    replicas: dict[int, Replica],
    now: datetime,
    changes: Changes,
    resumed: Sequence[datetime],
) -> bool:
    """Whether the round was closed, so that another follows."""
    number = run.next_round
    known = set(
        Contribution.objects.filter(round__run=run, round__number=number)
        .filter(Q(uploaded_at__isnull=False) | Q(state=ContributionState.REFUSED))
        .values_list("replica__number", "incarnation")
    )
    found = _read_round(store, number, known, frozenset(replicas))
    if found.commit is None and not found.commit_refused:
        _store_open_round(run, found, replicas, now, changes)
        return False
    _store_closed_round(run, found, replicas, now, changes, resumed)
    return True


def _get(store: Store, key: str, kind: type[R], bad: list[tuple[str, BadRecord]]) -> R | None:
    try:
        record = kind.read(store, key)
        check_record(record)
        return record
    except MissingKey:
        return None
    except BadRecord as error:
        bad.append((key, error))
        return None


def _read_round(
    store: Store, number: int, known: set[tuple[int, str]], replicas: frozenset[int]
) -> RoundRecords:
    """I/O only. ``known`` are the contributions whose records were read before; those of other
    replicas than ``replicas``, of which the run has no row, are left alone."""
    bad: list[tuple[str, BadRecord]] = []
    commit = _get(store, keys.commit(number), Commit, bad)
    refused = str(bad[0][1]) if bad else ""
    if commit is not None and commit.round != number:
        refused = f"expected round {number}, found {commit.round}"
        bad.append((keys.commit(number), BadRecord(refused)))
        commit = None
    plan: Plan | None = None
    try:
        found = [i.key for i in store.list(keys.contributions(number), limit=CONTRIBUTIONS_LISTED)]
    except ListingTooLong as error:
        bad.append((keys.contributions(number), BadRecord(str(error))))
        plan = _get(store, keys.plan(number), Plan, bad)
        found = [
            keys.contribution_record(number, line.replica, line.incarnation)
            for line in (plan.contributions if plan is not None else ())
            if keys.is_incarnation(line.incarnation)
        ]
    # Sorted, so that of a replica that was relaunched in the round the newest process stays.
    listed = {
        parsed[1]: (parsed[2], key)
        for key in found
        if (parsed := keys.parse_contribution_record(key)) and parsed[1] in replicas
    }
    records: list[ContributionRecord] = []
    for replica, (incarnation, key) in listed.items():
        if (replica, incarnation) in known:
            continue
        record = _get(store, key, ContributionRecord, bad)
        if record is None:
            continue
        if (record.round, record.replica, record.incarnation) == (number, replica, incarnation):
            records.append(record)
        else:
            bad.append((key, BadRecord("expected a record of its own key, found another's")))
    if plan is None and (listed or commit is not None):
        plan = _get(store, keys.plan(number), Plan, bad)
    return RoundRecords(
        number=number,
        commit=commit,
        plan=plan,
        contributions=tuple(records),
        bad=tuple(bad),
        commit_refused=refused,
    )


def _store_open_round(
    run: Run, found: RoundRecords, replicas: dict[int, Replica], now: datetime, changes: Changes
) -> None:
    if not (found.plan or found.contributions or found.bad):
        return
    with transaction.atomic():
        row, created = Round.objects.get_or_create(run=run, number=found.number)
        changed = created
        if found.plan is not None and row.state == RoundState.COLLECTING:
            changed = True
            Round.objects.filter(pk=row.pk, state=RoundState.COLLECTING).update(
                state=RoundState.PLANNED,
                mode=clean_text(found.plan.mode, 16),
                contributors=len(found.plan.contributions),
                planned_at=wall(found.plan.wall_s, now),
            )
        for record in found.contributions:
            changed |= _store_record(row, record, replicas, now)
        _refuse_all(run, row, found.bad, replicas)
        if changed:
            round_strips.rebuild(row)
    if changed:
        changes.rounds.add(found.number)


def _store_record(
    row: Round, record: ContributionRecord, replicas: dict[int, Replica], now: datetime
) -> bool:
    """A durable contribution, before or after its round was closed."""
    replica = replicas.get(record.replica)
    if replica is None:
        return False
    Contribution.objects.update_or_create(
        round=row,
        replica=replica,
        defaults={
            "incarnation": record.incarnation,
            "base_round": record.base_round,
            "tokens": record.tokens,
            "steps": record.steps,
            "loss": finite(record.loss),
            "norm": finite(record.norm),
            "size_bytes": record.size_bytes,
            "uploaded_at": wall(record.wall_s, now),
        },
    )
    return True


def _refuse_all(
    run: Run,
    row: Round,
    bad: tuple[tuple[str, BadRecord], ...],
    replicas: dict[int, Replica],
) -> None:
    for key, error in bad:
        parsed = keys.parse_contribution_record(key)
        replica = replicas.get(parsed[1]) if parsed else None
        refuse(run, key, error, replica=replica)
        if parsed and replica:
            Contribution.objects.update_or_create(
                round=row,
                replica=replica,
                defaults={
                    "incarnation": parsed[2],
                    "state": ContributionState.REFUSED,
                    "reason": clean_text(str(error)),
                },
            )


def _store_closed_round(
    run: Run,
    found: RoundRecords,
    replicas: dict[int, Replica],
    now: datetime,
    changes: Changes,
    resumed: Sequence[datetime],
) -> bool:
    """Move the cursor past a round and store how it ended, once. False if it was done before."""
    commit, plan = found.commit, found.plan
    before: Before | None = None
    with transaction.atomic():
        fields: dict[str, Any] = {"next_round": found.number + 1}
        row_fields: dict[str, Any] = {"state": RoundState.VOID, "reason": ""}
        if commit is None:
            row_fields["reason"] = clean_text(f"commit refused: {found.commit_refused}")
        else:
            at = wall(commit.wall_s, now)
            before = commit_before(run, found.number, at, resumed)
            row_fields |= {
                "fragment": commit.fragment,
                "contributors": len(commit.contributors),
                "tokens_total": commit.tokens_total,
                "loss": _round_loss(commit, plan),
                "committed_at": at,
            }
            fields |= {"tokens": row_fields["tokens_total"], "committed_at": now}
            if commit.void:
                row_fields |= {"reason": clean_text(commit.void), "contributors": 0}
            else:
                row_fields["state"] = RoundState.COMMITTED
                fields["committed_rounds"] = F("committed_rounds") + 1
                fields["round_s"] = smoothed(run.round_s, before, at)
        if plan is not None:
            row_fields |= {"mode": clean_text(plan.mode, 16), "planned_at": wall(plan.wall_s, now)}
        if not Run.objects.filter(pk=run.pk, next_round=found.number).update(**fields):
            run.refresh_from_db()
            return False
        row, _ = Round.objects.update_or_create(run=run, number=found.number, defaults=row_fields)
        for record in found.contributions:
            _store_record(row, record, replicas, now)
        _store_outcomes(row, commit, plan, replicas)
        _refuse_all(run, row, found.bad, replicas)
        _tell(run, row, commit, plan, replicas)
        row = round_strips.rebuild(row)
        healing.mark(run, [row])
        _store_curves(run, row, before, changes)
        if commit is not None:
            date_evaluation(run, found.number, commit.tokens_total)
        if row.eval_loss is not None:  # it was read before the commit
            Run.objects.filter(pk=run.pk, eval_round__lte=found.number).update(
                eval_loss=row.eval_loss, eval_round=found.number
            )
    run.refresh_from_db()
    changes.run = True
    changes.rounds.add(found.number)
    return True


def _store_curves(run: Run, row: Round, before: Before | None, changes: Changes) -> None:
    """What the round says on the run's own curves; the pace is from commit to commit."""
    found = round_strips.curves(run, [row])
    if row.committed_at and before and row.state == RoundState.COMMITTED:
        took_s = (row.committed_at - before.at).total_seconds()
        if took_s > 0:
            step = row.number * int(run.group_settings["sync_every"])
            pace = (row.tokens_total - before.tokens) / took_s
            at = (step, row.number, row.tokens_total, row.committed_at.timestamp())
            found["tokens_per_s"] = round_strips.points_of([(*at, pace)])
    add_points(run, None, found, key="round")
    changes.points += [(name, None, points) for name, points in found.items()]


def _tell(
    run: Run, row: Round, commit: Commit | None, plan: Plan | None, replicas: dict[int, Replica]
) -> None:
    """Events of what went wrong in a round: it is void, or contributions were refused."""
    if row.state == RoundState.VOID:
        culprit = commit.void_replica if commit else None
        record_event(
            run,
            "round_void",
            f"round {row.number} is void: {row.reason}",
            level=Event.Level.WARNING,
            replica=replicas.get(culprit) if culprit is not None else None,
        )
    refused = plan.refused if plan else ()
    if len(refused) > REFUSALS_NAMED:
        record_event(
            run,
            "contribution_refused",
            f"round {row.number}: {len(refused)} contributions refused, of which "
            f"{REFUSALS_NAMED} are named",
            level=Event.Level.WARNING,
        )
    for refusal in refused[:REFUSALS_NAMED]:
        record_event(
            run,
            "contribution_refused",
            f"round {row.number}: contribution of replica {refusal.replica} refused: "
            f"{refusal.reason}",
            level=Event.Level.WARNING,
            replica=replicas.get(refusal.replica),
        )


def _round_loss(commit: Commit, plan: Plan | None) -> float | None:
    """Of the commit, else the plan's losses weighted by tokens."""
    if commit.loss is not None or plan is None:
        return finite(commit.loss)
    tokens = sum(c.tokens for c in plan.contributions)
    if not tokens:
        return None
    return finite(sum(c.loss * c.tokens for c in plan.contributions) / tokens)


def _store_outcomes(
    row: Round, commit: Commit | None, plan: Plan | None, replicas: dict[int, Replica]
) -> None:
    """Who was in, who was refused; what remains came too late."""
    included = {c.replica for c in commit.contributors} if commit and not commit.void else set()
    for planned in plan.contributions if plan else ():
        replica = replicas.get(planned.replica)
        if replica is None:
            continue
        outcome: dict[str, Any] = {
            "incarnation": clean_text(planned.incarnation, 16),
            "weight": finite(planned.weight) or 0.0,
            "tokens": planned.tokens,
            "steps": planned.steps,
            "loss": finite(planned.loss),
            "size_bytes": planned.size_bytes,
        }
        if planned.replica in included:
            outcome |= {"state": ContributionState.INCLUDED, "reason": ""}
        elif commit and commit.void_replica == planned.replica:
            outcome |= {"state": ContributionState.REFUSED, "reason": clean_text(commit.void)}
        else:
            outcome |= {"state": ContributionState.LATE, "reason": "the round is void"}
        Contribution.objects.update_or_create(round=row, replica=replica, defaults=outcome)
    planned_numbers = {c.replica for c in plan.contributions} if plan else set()
    for identity in commit.contributors if commit and not commit.void else ():
        replica = replicas.get(identity.replica)
        if replica is not None and identity.replica not in planned_numbers:
            # The plan was unreadable; the commit alone says who was in.
            Contribution.objects.update_or_create(
                round=row,
                replica=replica,
                defaults={
                    "incarnation": clean_text(identity.incarnation, 16),
                    "state": ContributionState.INCLUDED,
                },
            )
    for refusal in plan.refused if plan else ():
        replica = replicas.get(refusal.replica)
        if replica is not None:
            Contribution.objects.update_or_create(
                round=row,
                replica=replica,
                defaults={
                    "incarnation": clean_text(refusal.incarnation, 16),
                    "state": ContributionState.REFUSED,
                    "reason": clean_text(refusal.reason),
                },
            )
    Contribution.objects.filter(round=row, state=ContributionState.UPLOADED).update(
        state=ContributionState.LATE, reason="came after the plan"
    )
