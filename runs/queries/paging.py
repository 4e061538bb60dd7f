"""Filters of runs, and pages of events and log lines, for the API.

Pagination is by key, so that no row is missed or repeated while rows are added, and each page costs
the same. Each function makes a constant number of queries. Queries of the pages are in
:mod:`runs.queries.selectors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Exists, OuterRef, QuerySet

from runs.json_values import iso
from runs.models import Checkpoint, ReplicaPool, Run
from runs.queries.selectors import event_row, events_of, lines_of, log_row


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """Filters of runs. Empty ones match every run; ``name`` matches any part of it,
    case-insensitively."""

    states: Sequence[str] = ()
    owner: str = ""
    backend: str = ""
    name: str = ""

    def of(self, runs: QuerySet[Run]) -> QuerySet[Run]:
        """The runs that match."""
        if self.states:
            runs = runs.filter(state__in=self.states)
        if self.owner:
            runs = runs.filter(owner__username=self.owner)
        if self.name:
            runs = runs.filter(name__icontains=self.name)
        if self.backend:
            pools = ReplicaPool.objects.filter(run=OuterRef("pk"), backend=self.backend)
            runs = runs.filter(Exists(pools))
        return runs


def events_after(run: Run, after_id: int, *, limit: int) -> list[dict[str, Any]]:
    """Rows of the events after ``after_id``, oldest first."""
    return [event_row(e) for e in events_of(run, after_id).order_by("id")[:limit]]


def log_lines(
    run: Run,
    *,
    replica: int | None = None,
    level: str = "",
    text: str = "",
    after_id: int | None = None,
    limit: int,
) -> list[dict[str, Any]]:
    """Log lines after ``after_id``, or the newest ones if it is None; oldest first."""
    lines = lines_of(run, replica=replica, search=text)
    if level:
        lines = lines.filter(level=level)
    if after_id is None:
        rows = list(reversed(lines.order_by("-id")[:limit]))
    else:
        rows = list(lines.filter(id__gt=after_id).order_by("id")[:limit])
    return [log_row(line) for line in rows]


def checkpoint_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of all checkpoints of a run, oldest first."""
    columns = ("round", "final", "key", "size_bytes", "digest", "created_at", "sample")
    rows = Checkpoint.objects.filter(run=run).order_by("round", "final").values(*columns)
    return [{**row, "created_at": iso(row["created_at"])} for row in rows]
