"""Rows of the API about one run: findings and activity. See :mod:`archipelago.rows`."""

from __future__ import annotations

from dataclasses import dataclass

from archipelago.rows import Row


@dataclass(frozen=True, kw_only=True)
class Finding(Row):
    """One condition of a run that needs attention. ``tab`` is the tab of the run page that shows
    it; ``replica`` and ``pool`` identify what it is about."""

    kind: str
    level: str
    message: str
    detail: str
    replica: int | None
    pool: int | None
    tab: str


@dataclass(frozen=True, kw_only=True)
class Activity(Row):
    """An event or an alert of a run. ``id`` is unique among rows of one ``source``, which is
    ``event`` or ``alert``. For an alert, ``at`` is when it opened last."""

    source: str
    id: int
    at: str | None
    level: str
    kind: str
    title: str
    message: str
    replica: int | None
    actor: str | None
    from_state: str
    to_state: str
    closed_at: str | None
    times: int
    acknowledged_at: str | None
    acknowledged_by: str | None
