"""Pages of runs, rounds, events and lines for programs: by key, so that none is lost or comes twice
while rows are added, and a far page costs what a near one does.

Each costs a constant number of queries. The pages' own queries are in
:mod:`runs.queries.selectors`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.db.models import Exists, OuterRef, Q, QuerySet

from runs.json_values import iso
from runs.models import Checkpoint, LogLine, ReplicaPool, Run
from runs.queries.selectors import event_row, events_of

Place = tuple[datetime, uuid.UUID]
"""Where a page of runs ends: when the last of it was created, and its id."""


def runs_page(
    visible: QuerySet[Run],
    *,
    before: Place | None = None,
    states: Sequence[str] = (),
    owner: str = "",
    backend: str = "",
    name: str = "",
    limit: int = 50,
) -> tuple[list[Run], Place | None]:
    """Runs newest first, and the place of the next page. Filters that are empty filter nothing;
    ``name`` is any part of it, in any case."""
    if before is not None:
        at, pk = before
        visible = visible.filter(Q(created_at__lt=at) | Q(created_at=at, pk__lt=pk))
    if states:
        visible = visible.filter(state__in=states)
    if owner:
        visible = visible.filter(owner__username=owner)
    if name:
        visible = visible.filter(name__icontains=name)
    if backend:
        pools = ReplicaPool.objects.filter(run=OuterRef("pk"), backend=backend)
        visible = visible.filter(Exists(pools))
    found = list(visible.order_by("-created_at", "-id")[: limit + 1])
    shown = found[:limit]
    more = (shown[-1].created_at, shown[-1].pk) if len(found) > limit else None
    return shown, more


def events_after(run: Run, after_id: int, *, limit: int) -> list[dict[str, Any]]:
    """Oldest first, from ``after_id`` on, as :func:`runs.queries.selectors.event_rows` has them."""
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
    """Oldest first: those after ``after_id``, or the newest there are if it is None."""
    lines = LogLine.objects.filter(replica__run=run).select_related("replica")
    if replica is not None:
        lines = lines.filter(replica__number=replica)
    if level:
        lines = lines.filter(level=level)
    if text:
        lines = lines.filter(message__icontains=text)
    if after_id is None:
        found = list(reversed(lines.order_by("-id")[:limit]))
    else:
        found = list(lines.filter(id__gt=after_id).order_by("id")[:limit])
    return [
        {
            "id": line.pk,
            "at": iso(line.at),
            "replica": line.replica.number,
            "level": line.level,
            "message": line.message,
        }
        for line in found
    ]


def checkpoint_rows(run: Run) -> list[dict[str, Any]]:
    """Oldest first."""
    return [
        {
            "round": c.round,
            "final": c.final,
            "key": c.key,
            "size_bytes": c.size_bytes,
            "digest": c.digest,
            "created_at": iso(c.created_at),
            "sample": c.sample,
        }
        for c in Checkpoint.objects.filter(run=run).order_by("round", "final")
    ]
