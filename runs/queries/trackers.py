"""Experiment trackers, and the mirrors of a run, as rows of pages and the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import Count, Q

from archipelago.tracker_rows import Mirror, Tracker
from diloco.trackers.opening import KINDS, open_tracker
from runs.json_values import row_of
from runs.models import ExperimentTracker, Run, RunMirror
from runs.trackers.mirror import destination_of, folder


def tracker_rows() -> list[dict[str, Any]]:
    """Rows of all trackers, by name. Their secrets stay encrypted."""
    active = Count("mirrors", filter=Q(mirrors__state=RunMirror.State.ACTIVE))
    return [
        row_of(Tracker, tracker, kind_label=_label(tracker))
        for tracker in ExperimentTracker.objects.annotate(active=active).order_by("name")
    ]


def tracker(pk: int) -> ExperimentTracker | None:
    return ExperimentTracker.objects.filter(pk=pk).first()


def mirror_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of the mirrors of a run, oldest first."""
    return [mirror_row(mirror) for mirror in run.mirrors.select_related("tracker")]


def mirror_row(mirror: RunMirror) -> dict[str, Any]:
    """The row of a mirror, whose tracker must be loaded."""
    return row_of(
        Mirror,
        mirror,
        tracker=mirror.tracker.name,
        kind_label=_label(mirror.tracker),
        url=_url(mirror.tracker, mirror.remote),
    )


def choices(run: Run | None = None) -> list[str]:
    """Names of enabled trackers; with ``run`` only those that do not have it yet."""
    trackers = ExperimentTracker.objects.filter(enabled=True)
    if run is not None:
        trackers = trackers.exclude(mirrors__run=run)
    return list(trackers.order_by("name").values_list("name", flat=True))


def _label(tracker: ExperimentTracker) -> str:
    kind = KINDS.get(tracker.kind)
    return kind.label if kind else tracker.kind


def _url(tracker: ExperimentTracker, remote: Any) -> str:
    try:
        client = open_tracker(destination_of(tracker), folder=folder())
        return client.url(remote if isinstance(remote, Mapping) else {})
    except (ValueError, KeyError):
        return ""  # an address that an earlier version accepted
