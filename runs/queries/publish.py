"""What a tick changed, as one delta for everybody who watches the run."""

from __future__ import annotations

from typing import Any

from runs import live_stream
from runs.metrics.changes import Changes
from runs.metrics.columns import columns
from runs.models import Run
from runs.queries import fleet, selectors


def publish_changes(run: Run, changes: Changes) -> bool:
    """One message, of the same rows that a snapshot has. New events are found by their id, so
    that those of other processes (a person's stop) are told as well. False when there is something
    to tell and Redis is away."""
    events = selectors.event_rows(run, after_id=run.published_event_id)
    if not changes and not events:
        return True
    run = selectors.with_header(Run.objects.filter(pk=run.pk)).get()
    delta: dict[str, Any] = {"run": selectors.run_header(run)}
    if changes.replicas or events:
        delta["replicas"] = fleet.replica_rows(run)
        delta["pools"] = fleet.pool_rows(run)
    if changes.rounds:
        delta["rounds"] = selectors.round_rows(run, numbers=changes.rounds)
    if changes.points:
        delta["points"] = [
            columns(points, series=series, replica=replica)
            for series, replica, points in changes.points
        ]
    if events:
        delta["events"] = events
    if not live_stream.publish(str(run.pk), delta):
        return False
    if events:  # only now: twice does no harm, never does
        Run.objects.filter(pk=run.pk).update(published_event_id=events[0]["id"])
    return True
