"""Rows of the API about experiment trackers."""

from __future__ import annotations

from dataclasses import dataclass

from archipelago.rows import Row


@dataclass(frozen=True, kw_only=True)
class Tracker(Row):
    """A tracker that runs can be mirrored to. ``kind_label`` is the kind in words, ``active`` the
    number of runs that are mirrored to it now."""

    id: int
    name: str
    kind: str
    kind_label: str
    server: str
    project: str
    enabled: bool
    active: int


@dataclass(frozen=True, kw_only=True)
class Mirror(Row):
    """The copy of a run's metrics in a tracker.

    ``state`` is *active*, *finished* (the run has ended and all its points are delivered) or
    *stopped*. ``points`` were delivered, the newest at ``delivered_at``. ``message`` is the error
    of the latest attempt, if it failed. ``url`` is the run's page in the tracker, if it has one.
    """

    tracker: str
    kind_label: str
    state: str
    points: int
    delivered_at: str | None
    message: str
    url: str
