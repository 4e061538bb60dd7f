"""What only the run page and the submit form show of a run: its origin, its checkpoints, and the
state of its bucket."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from django.db.models import Exists, F, OuterRef, QuerySet

from diloco.protocol.workload import WORKLOADS
from runs.json_values import iso
from runs.models import Checkpoint, Event, IngestState, ReplicaAttempt, Run

WRITE_FAILED = "could not be written"
"""Part of the message of each event about a failed write; pages show the newest such event."""
LANGUAGE_MODELS = tuple(kind for kind, each in WORKLOADS.items() if each.is_language_model)


def bucket_trouble(run: Run) -> dict[str, Any]:
    """Why the bucket of an active run cannot be read (``unreadable``, with the time since when) or
    written (``unwritable``); None if it can."""
    states = IngestState.objects.filter(run=run)
    annotated = states.annotate(failed_writes=F("run__journal__failures"))
    state = None if run.ended else annotated.first()
    if state is not None and state.trouble:
        since = iso(state.trouble_since)
        trouble = {"trouble": str(state.trouble), "trouble_since": since, "message": state.message}
        return {"unreadable": trouble, "unwritable": None}
    failed = state is not None and state.failed_writes
    return {"unreadable": None, "unwritable": _failed_write(run) if failed else None}


def _failed_write(run: Run) -> str:
    """Message of the newest failed write; a general sentence if its event is gone."""
    events = run.events.filter(kind="store", message__contains=WRITE_FAILED).order_by("-pk")
    newest = events.values_list("message", flat=True).first()
    return str(newest or "the journal could not be written")


def by_id(pk: uuid.UUID | str | None) -> Run | None:
    """The run with that id, without a check of who sees it: for the run that a run refers to."""
    return Run.objects.filter(pk=pk).first() if pk else None


def with_checkpoint(runs: QuerySet[Run]) -> QuerySet[Run]:
    """The runs that can be forked, at least of those whose checkpoints are kept."""
    return runs.filter(Exists(Checkpoint.objects.filter(run=OuterRef("pk"), final=False)))


def newest_checkpoints(run: Run, *, limit: int) -> list[Checkpoint]:
    return list(run.checkpoints.order_by("-round", "-final")[:limit])


def newest_events(run: Run, kind: str, *, limit: int) -> Sequence[Event]:
    return list(run.events.filter(kind=kind).order_by("-id")[:limit])


def sample_of(run: Run, checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    """The sample drawn from the final weights. Without one, ``sample_state`` is the reason; it is
    empty if the workload cannot generate text."""
    if run.workload.get("kind") not in LANGUAGE_MODELS:
        return {"sample": None, "sample_state": ""}
    final = next((row for row in checkpoints if row.final), None)
    if final is not None and final.sample:
        return {"sample": final.sample, "sample_state": "drawn"}
    if final is None:
        return {"sample": None, "sample_state": "no result" if run.ended else "not finished"}
    attempts = ReplicaAttempt.objects.filter(replica__run=run, ended_at=None)
    return {"sample": None, "sample_state": "on its way" if attempts.exists() else "none"}
