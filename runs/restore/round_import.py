"""Stores the closed rounds of an import, hundreds in a transaction.

Live ingest stores a round as its records arrive, in about twenty statements and a separate
transaction. An import meets closed rounds only, in a run without rows, so a batch of them takes a
few statements. The rows are the same: both compute them with :mod:`runs.ingest.round_rows`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from django.db import transaction

from diloco.protocol.records import BadRecord
from diloco.store.base import Store
from runs.bulk import insert_rows
from runs.exceptions import ActionRefused
from runs.ingest.round_pace import Before, smoothed, unless_resumed
from runs.ingest.round_reader import RoundRecords
from runs.ingest.round_rows import Warned, closed_columns, new_contributions, warnings
from runs.ingest.rounds import curves_of, record_warnings, refuse_records
from runs.log_context import about
from runs.metrics import round_strips
from runs.metrics.blocks import Points, concatenate
from runs.metrics.downsampling import add_points
from runs.models import Contribution, Replica, Round, Run
from runs.restore.read_ahead import closed_rounds
from runs.states import RoundState

ROWS = 4_000
"""Rows after which a batch gets no further round. One transaction stores it, which locks an SQLite
database for a fraction of a second."""

_FIELDS = tuple(f for f in Contribution._meta.concrete_fields if not f.primary_key)
_DEFAULTS = {f.attname: f.to_python(f.get_default()) for f in _FIELDS}


def import_closed_rounds(
    run: Run, store: Store, now: datetime, *, resumed: Sequence[datetime]
) -> None:
    """Store the closed rounds from ``next_round`` on, of a run without rows of later rounds.

    ``resumed`` are the times at which the run was resumed.
    """
    replicas = {r.number: r for r in Replica.objects.filter(run=run)}
    log = _Log(run, replicas, now, resumed)
    with contextlib.closing(closed_rounds(store, run.next_round, frozenset(replicas))) as rounds:
        for records in rounds:
            log.add(records)
    log.store()


@dataclass(frozen=True, kw_only=True)
class _Events:
    """Unreadable records of a round, and the events about it."""

    round: int
    bad: tuple[tuple[str, BadRecord], ...]
    warned: tuple[Warned, ...]


@dataclass
class _Batch:
    """Rows that are stored together."""

    rounds: list[Round] = field(default_factory=list)
    contributions: list[list[SimpleNamespace]] = field(default_factory=list)
    """Those of each round, with the columns of :class:`Contribution`; constructing the models takes
    longer than all the rest."""
    curves: dict[str, list[Points]] = field(default_factory=lambda: defaultdict(list))
    events: list[_Events] = field(default_factory=list)
    size: int = 0
    """Rows of the batch."""


@dataclass
class _Log:
    """The rounds of a run, in order. ``run`` has the totals of the rounds that were added."""

    run: Run
    replicas: Mapping[int, Replica]
    now: datetime
    resumed: Sequence[datetime]
    last: Before | None = None
    batch: _Batch = field(default_factory=_Batch)

    def add(self, records: RoundRecords) -> None:
        """Add the next round, and store the batch if it is full."""
        batch = self.batch
        columns = closed_columns(records, self.now)
        row = Round(run=self.run, number=records.number, **columns)
        created = {
            replica: SimpleNamespace(
                **{**_DEFAULTS, "replica_id": self.replicas[replica].pk, **values}
            )
            for replica, values in new_contributions(records, self.replicas, self.now).items()
        }
        round_strips.put(row, created.items())
        batch.rounds.append(row)
        batch.contributions.append(list(created.values()))
        for name, points in self._advance(row).items():
            batch.curves[name].append(points)
        warned = tuple(warnings(records, columns))
        if records.bad or warned:
            batch.events.append(_Events(round=records.number, bad=records.bad, warned=warned))
        batch.size += 1 + len(created) + len(records.bad) + len(warned)
        if batch.size >= ROWS:
            self.store()

    def _advance(self, row: Round) -> dict[str, Points]:
        """Add a round to the totals of the run; return its points."""
        run, at = self.run, row.committed_at
        if at is None:
            return curves_of(run, row, None)
        before = unless_resumed(self.last, at, self.resumed)
        curves = curves_of(run, row, before)
        run.tokens, run.committed_at = row.tokens_total, self.now
        if row.state == RoundState.COMMITTED:
            run.committed_rounds += 1
            run.round_s = smoothed(run.round_s, before, at)
        self.last = Before(at=at, tokens=row.tokens_total)
        return curves

    def store(self) -> None:
        """Store the batch. Raises :class:`ActionRefused` if another import of the run began."""
        run, batch, self.batch = self.run, self.batch, _Batch()
        if not batch.rounds:
            return
        names = ("tokens", "committed_at", "committed_rounds", "round_s")
        fields = {name: getattr(run, name) for name in names}
        first, last = batch.rounds[0].number, batch.rounds[-1].number
        with transaction.atomic():
            own = Run.objects.filter(pk=run.pk, next_round=first)
            if not own.update(next_round=last + 1, **fields):
                raise ActionRefused(
                    f"expected the rows of this import up to round {first - 1}, found others: "
                    "another import of the run has begun"
                )
            Round.objects.bulk_create(batch.rounds)
            insert_rows(Contribution, [f.name for f in _FIELDS], _values(batch))
            curves = {name: concatenate(parts) for name, parts in batch.curves.items()}
            add_points(run, None, curves, key="round")
            for events in batch.events:
                with about(round=events.round):
                    refuse_records(run, events.bad, self.replicas)
                    record_warnings(run, events.warned, self.replicas)
        run.refresh_from_db()


def _values(batch: _Batch) -> Iterator[list[Any]]:
    """The columns of all contributions, whose rounds are stored."""
    for row, contributions in zip(batch.rounds, batch.contributions, strict=True):
        for contribution in contributions:
            contribution.round_id, contribution.state = row.pk, str(contribution.state)
            yield [vars(contribution)[f.attname] for f in _FIELDS]
