"""Publish the changes of a tick as one delta to the viewers of a run."""

from __future__ import annotations

from typing import Any

from runs import live_stream
from runs.metrics.changes import Changes
from runs.models import Run
from runs.queries import fleet, round_summaries, selectors


def publish_changes(run: Run, changes: Changes) -> bool:
    """Publish one message with the same rows as a snapshot.

    New events are found by their ID, so that those of other processes (a user's stop request) are
    included. Returns False if there are changes and Redis is unavailable.
    """
    events = selectors.event_rows(run, after_id=run.published_event_id)
    if not changes and not events:
        return True
    run = selectors.with_header(Run.objects.filter(pk=run.pk)).get()
    delta: dict[str, Any] = {"run": selectors.run_header(run)}
    if changes.replicas or events:
        delta["replicas"] = fleet.replica_rows(run)
        delta["pools"] = fleet.pool_rows(run)
    if changes.rounds:
        delta["rounds"] = round_summaries.summaries(run, numbers=changes.rounds)
    if changes.points:
        delta["points"] = [
            points.to_json(series=series, replica=replica)
            for series, replica, points in changes.points
        ]
    if events:
        delta["events"] = events
    if not live_stream.publish(str(run.pk), delta):
        return False
    if events:  # after publishing: publishing twice does no harm, not publishing does
        Run.objects.filter(pk=run.pk).update(published_event_id=events[0]["id"])
    return True
