"""Reads rounds and contributions from the commits in the bucket.

A cursor, ``next_round``, walks the commits: GET the next one until there is none. A round's row and
the cursor change in one transaction under ``WHERE next_round = r``, so a commit is counted once,
however often a tick is repeated or killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import F, Q

from diloco.protocol import keys
from diloco.protocol.packed_rounds import PackedRounds
from diloco.protocol.records import BadRecord
from diloco.store.base import Store
from runs.ingest.round_pace import Before, commit_before, smoothed
from runs.ingest.round_reader import RoundRecords, read_round
from runs.ingest.round_rows import (
    LATE,
    Put,
    Warned,
    closed_columns,
    new_contributions,
    outcome_puts,
    plan_columns,
    record_puts,
    refusal_puts,
    warnings,
)
from runs.ingest.segments import date_evaluation
from runs.ingest.validation import refuse
from runs.log_context import about
from runs.metrics import healing, round_strips
from runs.metrics.blocks import Points
from runs.metrics.changes import Changes
from runs.metrics.downsampling import add_points
from runs.models import Contribution, Event, Replica, Round, Run
from runs.states import ContributionState, RoundState
from runs.transitions import record_event

COMMITS_PER_TICK = 50


def ingest_rounds(
    run: Run,
    store: Store,
    *,
    now: datetime,
    changes: Changes,
    resumed: Sequence[datetime] | None = None,
) -> bool:
    """Store all new commits (at most :data:`COMMITS_PER_TICK`), then the records of the open round.

    Returns False if there can be more commits. ``resumed`` are the times at which the run was
    resumed after a pause or an end; by default only the last one, which is enough for rounds that
    are ingested as they are committed.
    """
    if resumed is None:
        resumed = [run.resumed_at] if run.resumed_at else []
    replicas = {r.number: r for r in Replica.objects.filter(run=run)}
    rounds = _Rounds(run, PackedRounds(store), replicas, now, changes, resumed)
    for _ in range(COMMITS_PER_TICK):
        with about(round=run.next_round):
            if not rounds.ingest_next():
                return True
    return False


@dataclass
class _Rounds:
    """One pass over the commits of a run."""

    run: Run
    store: PackedRounds
    replicas: Mapping[int, Replica]
    now: datetime
    changes: Changes
    resumed: Sequence[datetime]

    def ingest_next(self) -> bool:
        """Store the next round; return whether it was closed, so that another one follows."""
        number = self.run.next_round
        known = set(
            Contribution.objects.filter(round__run=self.run, round__number=number)
            .filter(Q(uploaded_at__isnull=False) | Q(state=ContributionState.REFUSED))
            .values_list("replica__number", "incarnation")
        )
        records = read_round(self.store, number, known, frozenset(self.replicas))
        if records.commit is None and not records.commit_refused:
            self._store_open_round(records)
            return False
        self._store_closed_round(records)
        return True

    def _store_open_round(self, records: RoundRecords) -> None:
        if not (records.plan or records.contributions or records.bad):
            return
        with transaction.atomic():
            row, changed = Round.objects.get_or_create(run=self.run, number=records.number)
            if records.plan is not None and row.state == RoundState.COLLECTING:
                changed = True
                Round.objects.filter(pk=row.pk, state=RoundState.COLLECTING).update(
                    state=RoundState.PLANNED,
                    contributors=len(records.plan.contributions),
                    **plan_columns(records.plan, self.now),
                )
            for put in record_puts(records, self.now):
                changed |= self._put(row, put)
            self._put_all(row, refusal_puts(records))
            refuse_records(self.run, records.bad, self.replicas)
            if changed:
                round_strips.rebuild(row)
        if changed:
            self.changes.rounds.add(records.number)

    def _put(self, row: Round, put: Put) -> bool:
        """Create or update the contribution of a replica; False for one that the run lacks."""
        if put.replica not in self.replicas:
            return False
        Contribution.objects.update_or_create(
            round=row, replica=self.replicas[put.replica], defaults=put.columns
        )
        return True

    def _put_all(self, row: Round, puts: Iterable[Put]) -> None:
        for put in puts:
            self._put(row, put)

    def _store_closed_round(self, records: RoundRecords) -> None:
        """Advance the cursor past a round and store its outcome, unless another process did."""
        run, commit = self.run, records.commit
        row_fields = closed_columns(records, self.now)
        before: Before | None = None
        with transaction.atomic():
            fields: dict[str, Any] = {"next_round": records.number + 1}
            if commit is not None:
                at = row_fields["committed_at"]
                before = commit_before(run, records.number, at, self.resumed)
                fields |= {"tokens": row_fields["tokens_total"], "committed_at": self.now}
                if row_fields["state"] == RoundState.COMMITTED:
                    fields["committed_rounds"] = F("committed_rounds") + 1
                    fields["round_s"] = smoothed(run.round_s, before, at)
            if not Run.objects.filter(pk=run.pk, next_round=records.number).update(**fields):
                run.refresh_from_db()
                return
            row, is_new = Round.objects.update_or_create(
                run=run, number=records.number, defaults=row_fields
            )
            self._store_outcomes(row, records, is_new=is_new)
            refuse_records(run, records.bad, self.replicas)
            record_warnings(run, warnings(records, row_fields), self.replicas)
            row = round_strips.rebuild(row)
            healed = healing.mark(run, [row])
            self._store_curves(row, before)
            if commit is not None:
                date_evaluation(run, records.number, commit.tokens_total)
            if row.eval_loss is not None:  # the evaluation was read before the commit
                Run.objects.filter(pk=run.pk, eval_round__lte=records.number).update(
                    eval_loss=row.eval_loss, eval_round=records.number
                )
        run.refresh_from_db()
        self.changes.run = True
        self.changes.rounds.update({records.number, *healed})

    def _store_outcomes(self, row: Round, records: RoundRecords, *, is_new: bool) -> None:
        """Store the contributions of a closed round with their outcomes. Those of a new round are
        created together: their statements do not grow with the number of replicas."""
        if is_new:
            created = new_contributions(records, self.replicas, self.now)
            Contribution.objects.bulk_create(
                Contribution(round=row, replica=self.replicas[replica], **columns)
                for replica, columns in created.items()
            )
            return
        self._put_all(row, record_puts(records, self.now))
        self._put_all(row, outcome_puts(records))
        Contribution.objects.filter(round=row, state=ContributionState.UPLOADED).update(**LATE)
        self._put_all(row, refusal_puts(records))

    def _store_curves(self, row: Round, before: Before | None) -> None:
        curves = curves_of(self.run, row, before)
        add_points(self.run, None, curves, key="round")
        self.changes.points += [(name, None, points) for name, points in curves.items()]


def refuse_records(
    run: Run, bad: Iterable[tuple[str, BadRecord]], replicas: Mapping[int, Replica]
) -> None:
    """Count the unreadable records of a round, and record their events."""
    for key, error in bad:
        parsed = keys.parse_contribution_record(key)
        refuse(run, key, error, replica=replicas.get(parsed[1]) if parsed else None)


def record_warnings(run: Run, warned: Iterable[Warned], replicas: Mapping[int, Replica]) -> None:
    """Record the events about a closed round."""
    for one in warned:
        own = replicas.get(one.replica) if one.replica is not None else None
        record_event(run, one.kind, one.message, level=Event.Level.WARNING, replica=own)


def curves_of(run: Run, row: Round, before: Before | None) -> dict[str, Points]:
    """The round's values on the run's own curves. Throughput is from commit to commit."""
    curves = round_strips.curves(run, [row])
    if row.committed_at and before and row.state == RoundState.COMMITTED:
        took_s = (row.committed_at - before.at).total_seconds()
        if took_s > 0:
            step = row.number * run.settings.sync_every
            pace = (row.tokens_total - before.tokens) / took_s
            at = (step, row.number, row.tokens_total, row.committed_at.timestamp())
            curves["tokens_per_s"] = round_strips.points_of([(*at, pace)])
    return curves
