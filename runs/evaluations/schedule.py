"""Queues the evaluations of new checkpoints, and enqueues tasks for those that are due.

A plan and a round have at most one evaluation, by a constraint of the database, so that a tick that
is repeated or killed queues nothing twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Count, F, Q
from django.utils import timezone

from runs.backends import shared_breakers
from runs.models import Evaluation, EvaluationPlan
from runs.submit.clone_and_fork import KEPT
from runs.task_queue import enqueue
from runs.times import due

LONGEST_WAIT = timedelta(hours=1)
AFTER_END = timedelta(days=1)
"""How long new checkpoints of an ended run are looked for; a plan that is saved later considers
those that there are."""
AT_ONCE = 50


def call_for_due() -> None:
    """Queue evaluations of new checkpoints, and enqueue a task for each whose step is due."""
    now = timezone.now()
    is_live = Q(run__ended_at=None) | Q(run__ended_at__gt=now - AFTER_END) | Q(considered=0)
    plans = EvaluationPlan.objects.filter(
        is_live, enabled=True, every__gt=0, run__delete_requested_at=None
    ).annotate(written=Count("run__checkpoints"))
    for plan in plans.exclude(written=F("considered"))[:AT_ONCE]:
        queue_new(plan, now)
    active = Evaluation.objects.filter(
        due("next_at", LONGEST_WAIT, now), state__in=Evaluation.ACTIVE
    )
    for pk in active.order_by("next_at").values_list("pk", flat=True)[:AT_ONCE]:
        enqueue("advance_evaluation", pk)


def queue_new(plan: EvaluationPlan, now: datetime) -> None:
    """Queue the evaluations of the checkpoints that the plan wants and whose weights are kept."""
    written = list(plan.run.checkpoints.order_by("round").values_list("round", "final"))
    rounds = wanted_rounds(written, every=plan.every)
    with transaction.atomic():
        Evaluation.objects.bulk_create(
            (
                Evaluation(plan=plan, run_id=plan.run_id, round=number, created_at=now, next_at=now)
                for number in rounds
            ),
            ignore_conflicts=True,
        )
        EvaluationPlan.objects.filter(pk=plan.pk).update(considered=len(written))


def wanted_rounds(written: Iterable[tuple[int, bool]], *, every: int) -> list[int]:
    """The rounds to evaluate, ascending, of checkpoints (round, whether final).

    Of the checkpoints after the initial weights each ``every``-th, as far as its weights are kept,
    and the final weights.
    """
    rows: Sequence[tuple[int, bool]] = list(written)
    rounds = sorted({number for number, final in rows if not final})
    kept = set(rounds[-KEPT:])
    trained = [number for number in rounds if number > 0]
    wanted = {number for number in trained[every - 1 :: every] if number in kept}
    return sorted(wanted | {number for number, final in rows if final and number > 0})


@dataclass(frozen=True, kw_only=True)
class Places:
    """What a step of an evaluation uses: its run, the account of its jobs and the run's store."""

    run: str
    account: str
    store: str


def places_of(evaluation_id: int) -> Places | None:
    """The places of an evaluation; None if it was deleted."""
    row = Evaluation.objects.select_related("run", "plan").filter(pk=evaluation_id).first()
    if row is None:
        return None
    return Places(
        run=str(row.run_id),
        account=shared_breakers.account_place(row.plan),
        store=shared_breakers.store_place(row.run),
    )
