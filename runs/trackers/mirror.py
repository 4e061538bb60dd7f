"""Delivers a run's metrics to a tracker, each point once, across kills of workers.

A pass stores the rows that it is about to deliver (``pending``), delivers them, and then advances
the positions. A worker that is killed in between leaves the pending rows, and the next pass
delivers exactly these again; every tracker stores a row that it has already only once
(:mod:`diloco.trackers`). Each write of a pass is conditional on the number of delivered rows, so
that two passes of one mirror do not both advance it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db.models import F, Q
from django.utils import timezone

from diloco.trackers.base import MirroredRun, Outcome, Tracker, TrackerError, TrackerRow
from diloco.trackers.opening import KINDS, Destination, open_tracker
from executors.base import AccountError
from runs.credentials.tracker_addresses import move_address
from runs.credentials.vault import unseal
from runs.json_values import mapping
from runs.models import Event, ExperimentTracker, Run, RunMirror
from runs.outbound import check_url, open_url
from runs.redaction import clean_text
from runs.states import RUN_ACTIVE, RunState
from runs.task_queue import enqueue
from runs.times import due
from runs.trackers.points import next_batch
from runs.transitions import record_event

logger = logging.getLogger(__name__)

EVERY = timedelta(seconds=10)
EVERY_SLOW = timedelta(seconds=30)
"""Pause between passes of trackers that start a process for each batch."""
LONGEST_WAIT = timedelta(hours=1)
CLAIM = timedelta(minutes=10)
"""Time after which another pass starts, if the worker of a pass was killed."""
PASS_S = 30.0
AFTER_END = timedelta(minutes=10)
"""How long telemetry of an ended run is waited for."""
GIVE_UP = timedelta(days=1)
"""How long an ended run's mirror is retried while the tracker fails."""
AT_ONCE = 50

_OUTCOMES: dict[str, Outcome] = {RunState.SUCCEEDED: "succeeded", RunState.FAILED: "failed"}
Opener = Callable[[ExperimentTracker], Tracker]


def call_for_due() -> None:
    """Enqueue a task for every mirror whose pass is due."""
    # A run that was resumed after its end is mirrored further.
    RunMirror.objects.filter(state=RunMirror.State.FINISHED, run__state__in=RUN_ACTIVE).update(
        state=RunMirror.State.ACTIVE, outcome_sent=False, next_at=timezone.now()
    )
    waiting = RunMirror.objects.filter(
        due("next_at", LONGEST_WAIT, timezone.now()),
        state=RunMirror.State.ACTIVE,
        tracker__enabled=True,
    )
    for pk in waiting.order_by("next_at").values_list("pk", flat=True)[:AT_ONCE]:
        enqueue("mirror_run", str(pk))


def resume_finished(run: Run) -> None:
    """Deliver points that an ended run has received since, such as results of evaluations."""
    RunMirror.objects.filter(run=run, state=RunMirror.State.FINISHED).update(
        state=RunMirror.State.ACTIVE, next_at=timezone.now()
    )


def open_stored(tracker: ExperimentTracker) -> Tracker:
    """The client of a stored tracker. HTTP goes to public and allowed addresses only; a library
    that opens its own connections has its address checked here. Raises :class:`TrackerError` for
    another address."""
    try:
        move_address(tracker)
        destination = destination_of(tracker)
        if destination.kind == "wandb":
            check_url(destination.address)
    except ValueError as error:
        raise TrackerError(str(error)) from None
    secrets = unseal(tracker.sealed, name=f"tracker {tracker.name}") if tracker.sealed else {}
    return open_tracker(destination, folder=folder(), secrets=secrets, open=open_url)


def destination_of(tracker: ExperimentTracker) -> Destination:
    return Destination(kind=tracker.kind, server=tracker.server, project=tracker.project)


def folder() -> Path:
    """Files of trackers on this server."""
    return Path(settings.VAR_DIR) / "trackers"


def mirror(mirror_id: str, *, opener: Opener = open_stored) -> None:
    """Make one pass, if it is due, its tracker is enabled and no other worker has claimed it."""
    now = timezone.now()
    claimed = RunMirror.objects.filter(
        due("next_at", LONGEST_WAIT, now),
        pk=mirror_id,
        state=RunMirror.State.ACTIVE,
        tracker__enabled=True,
    ).update(next_at=now + CLAIM)
    if not claimed:
        return
    row = RunMirror.objects.select_related("run__owner", "tracker").get(pk=mirror_id)
    run_pass = _Pass(row=row, run=described(row.run), opener=opener)
    try:
        all_delivered = run_pass.deliver()
    except (TrackerError, AccountError) as error:
        _failed(row, clean_text(str(error), 500), now)
    except Exception as error:  # also the time limit: the next pass would be as long
        logger.exception("mirror %s of run %s: the pass failed", row.pk, row.run_id)
        _failed(row, clean_text(f"{type(error).__name__}: {error}", 500), now)
    else:
        _succeeded(row, now, all_delivered=all_delivered)


def described(run: Run) -> MirroredRun:
    """The run as a tracker shows it."""
    config = {**_flat("settings", run.group_settings), **_flat("workload", run.workload)}
    started = run.started_at or run.created_at
    tags = [str(tag) for tag in run.tags] if isinstance(run.tags, list) else []
    return MirroredRun(
        id=str(run.pk),
        name=run.name,
        started_s=started.timestamp(),
        config=config | {"owner": run.owner.get_username(), "rendezvous": run.rendezvous},
        tags=tuple(tags),
    )


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    plain = (str, int, float, bool)
    return {
        f"{prefix}.{name}": entry if isinstance(entry, plain) else str(entry)
        for name, entry in mapping(value).items()
    }


@dataclass(kw_only=True)
class _Pass:
    row: RunMirror
    run: MirroredRun
    opener: Opener

    def deliver(self) -> bool:
        """Deliver batches until none is left (True) or the time of a pass is used up (False)."""
        began = timezone.now()
        tracker = self.opener(self.row.tracker)
        if not self.row.started:
            self._advance(remote=tracker.start(self.run, {}), started=True)
        while timezone.now() - began < timedelta(seconds=PASS_S):
            if self.row.pending is None and not self._prepare():
                if self.row.run.ended and not self.row.outcome_sent:
                    outcome = _OUTCOMES.get(self.row.run.state, "cancelled")
                    remote = tracker.finish(self.run, outcome, dict(self.row.remote))
                    self._advance(remote=remote, outcome_sent=True)
                return True
            pending = mapping(self.row.pending)
            rows = [TrackerRow.from_dict(body) for body in pending["rows"]]
            remote = tracker.log(self.run, rows, dict(self.row.remote))
            self._advance(
                remote=remote,
                pending=None,
                positions=pending["positions"],
                number=self.row.number + len(rows),
                points=self.row.points + sum(len(row.values) for row in rows),
                delivered_at=timezone.now(),
            )
        return False

    def _prepare(self) -> bool:
        """Store the next rows as pending. False if there are none."""
        batch = next_batch(self.row.run, self.row.positions, number=self.row.number)
        if not batch.rows:
            return False
        rows = [row.to_dict() for row in batch.rows]
        pending = {"rows": rows, "positions": dict(batch.positions)}
        self._advance(only=Q(pending__isnull=True), pending=pending)
        return True

    def _advance(self, *, only: Q | None = None, **columns: Any) -> None:
        """Update the mirror, unless another pass has."""
        unchanged = RunMirror.objects.filter(
            only or Q(), pk=self.row.pk, number=self.row.number, state=RunMirror.State.ACTIVE
        )
        if not unchanged.update(**columns):
            raise TrackerError("another pass of this mirror was faster, or it was stopped")
        for name, value in columns.items():
            setattr(self.row, name, value)


def _succeeded(row: RunMirror, now: datetime, *, all_delivered: bool) -> None:
    waited = row.run.ended_at is None or now - row.run.ended_at > AFTER_END
    finished = all_delivered and row.run.ended and row.outcome_sent and waited
    pause = EVERY_SLOW if KINDS[row.tracker.kind].is_slow else EVERY
    RunMirror.objects.filter(pk=row.pk, state=RunMirror.State.ACTIVE).update(
        state=RunMirror.State.FINISHED if finished else RunMirror.State.ACTIVE,
        failures=0,
        message="",
        next_at=now + (pause if all_delivered else timedelta(0)),
    )
    if row.failures:
        record_event(row.run, "mirror", f"metrics are mirrored to {row.tracker} again")


def _failed(row: RunMirror, message: str, now: datetime) -> None:
    wait = min(EVERY * 2 ** min(row.failures, 10), LONGEST_WAIT)
    given_up = row.run.ended and now - (row.run.ended_at or now) > GIVE_UP
    RunMirror.objects.filter(pk=row.pk, state=RunMirror.State.ACTIVE).update(
        failures=F("failures") + 1,
        message=message,
        next_at=now + wait,
        state=RunMirror.State.STOPPED if given_up else RunMirror.State.ACTIVE,
    )
    if not row.failures:
        record_event(
            row.run,
            "mirror",
            f"metrics could not be mirrored to {row.tracker}: {message}",
            level=Event.Level.WARNING,
        )
