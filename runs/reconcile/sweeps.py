"""Control of a sweep: launch held runs as others end, and stop it when its budget is spent.

It needs only the database. Each write is conditional, so it can be repeated or run twice.
"""

from __future__ import annotations

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from runs.models import Run, Sweep
from runs.states import RUN_ACTIVE, RUN_TRANSITIONS, RunState
from runs.submit.create import WAITING
from runs.task_queue import enqueue
from runs.transitions import record_event, transition


def sweeps_to_control() -> QuerySet[Sweep]:
    """Sweeps with a held run, and those with a budget and an active run."""
    active = Run.objects.filter(sweep=OuterRef("pk"), state__in=RUN_ACTIVE)
    held = active.filter(state=RunState.QUEUED, sweep_held=True)
    return Sweep.objects.filter(Exists(held) | Q(budget_usd__gt=0) & Exists(active)).order_by("pk")


def control_sweep(sweep_id: str) -> None:
    """One control tick of a sweep."""
    with transaction.atomic():
        sweep = Sweep.objects.select_for_update().filter(pk=sweep_id).first()
        if sweep is None:
            return
        runs = list(sweep.runs.order_by("sweep_index"))
        spent = sweep.deleted_usd + sum(run.cost_usd for run in runs)
        if sweep.budget_usd and spent >= sweep.budget_usd:
            _stop(runs, f"the budget of its sweep, ${sweep.budget_usd:.2f}, is spent")
            return
        _launch(sweep, runs)


def _launch(sweep: Sweep, runs: list[Run]) -> None:
    held = [run for run in runs if run.sweep_held and run.state == RunState.QUEUED]
    # A paused run occupies no machine; a stopping one does until it has ended.
    working = [run for run in runs if run.state in RUN_ACTIVE and not run.sweep_held]
    free = sweep.parallel - len(working) if sweep.parallel else len(held)
    for run in held[: max(free, 0)]:
        if Run.objects.filter(pk=run.pk, state=RunState.QUEUED, sweep_held=True).update(
            sweep_held=False, state_since=timezone.now(), state_reason=WAITING
        ):
            record_event(run, "sweep", f"launched as run {run.sweep_index + 1} of {len(runs)}")
            enqueue("launch_run", str(run.pk))


def _stop(runs: list[Run], reason: str) -> None:
    for run in runs:
        can_stop = RunState.STOPPING in RUN_TRANSITIONS[RunState(run.state)]
        if (
            run.state in RUN_ACTIVE
            and can_stop
            and transition(run, RunState.STOPPING, reason=reason)
        ):
            enqueue("reconcile_run", str(run.pk))
