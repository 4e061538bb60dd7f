"""Change what is evaluated of a run's checkpoints; request, repeat and cancel evaluations.

Each change is an event of the run.
"""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.utils import timezone

from runs.bulk import update_row
from runs.exceptions import ActionRefused, InvalidRun
from runs.ingest.journal import mark_due
from runs.local_access import refused_local
from runs.models import Evaluation, EvaluationAttempt, EvaluationPlan, Run
from runs.submit.evaluation_plans import MOST_PLANS, check_plan, new_plan, put
from runs.submit.run_draft import PlanDraft, spec_values
from runs.task_queue import enqueue
from runs.transitions import record_event

State = Evaluation.State


def save_plan(run: Run, draft: PlanDraft, *, actor: User) -> EvaluationPlan:
    """Add a plan to the run, or change the one with that name.

    Results of one plan are comparable, so a plan that has evaluations keeps its data and tasks.
    Raises :class:`InvalidRun` with the fields that are wrong.
    """
    check_plan(draft, run.workload)
    if problem := refused_local(actor, draft.backend, run.workload):
        raise InvalidRun("backend", problem)
    with transaction.atomic():
        Run.objects.select_for_update().get(pk=run.pk)
        plan = EvaluationPlan.objects.filter(run=run, name=draft.name).first()
        if plan is None:
            if run.evaluation_plans.filter(enabled=True).count() >= MOST_PLANS:
                raise InvalidRun("name", f"a run can have {MOST_PLANS} evaluations; remove one")
            plan, done = new_plan(run, draft, actor=actor, now=timezone.now()), "added"
        else:
            if plan.spec != spec_values(draft.spec) and plan.evaluations.exists():
                raise InvalidRun(
                    "name",
                    f"enter another name: {plan.name} has results of other data or tasks",
                )
            moves = (plan.backend, plan.credential_id) != (draft.backend, draft.credential)
            if moves and plan.evaluations.filter(state__in=Evaluation.WITH_JOB).exists():
                raise InvalidRun(
                    "backend", f"cancel the evaluation of {plan} that runs on {plan.backend} first"
                )
            done = "changed" if plan.enabled else "added"
            put(draft, plan, actor=actor)
        plan.save()
        _record(run, f"{plan} {done}", actor)
        enqueue("evaluations_due")
    return plan


def remove_plan(run: Run, name: str, *, actor: User) -> bool:
    """Remove a plan and its evaluations; their points stay in charts. False if there is none.

    A plan whose jobs cost something is only hidden: the run, its budgets and the spending of its
    owner have these costs. Raises :class:`ActionRefused` while an evaluation of the plan has a job.
    """
    with transaction.atomic():
        Run.objects.select_for_update().get(pk=run.pk)  # no evaluation gets a job meanwhile
        plan = EvaluationPlan.objects.filter(run=run, name=name, enabled=True).first()
        if plan is None:
            return False
        if plan.evaluations.filter(state__in=Evaluation.WITH_JOB).exists():
            raise ActionRefused(f"cancel the running evaluation of {plan} first")
        if EvaluationAttempt.objects.filter(evaluation__plan=plan).exists():
            queued = plan.evaluations.filter(state=State.QUEUED)
            queued.update(state=State.CANCELLED, ended_at=timezone.now())
            update_row(plan, enabled=False)
        else:
            plan.delete()
        _record(run, f"{name} removed", actor)
    return True


def evaluate(run: Run, name: str, *, actor: User, round: int | None = None) -> bool:
    """Queue the evaluation of a round, by default the newest checkpoint; repeat a failed one.

    False if it is queued, runs or has succeeded. Raises :class:`ActionRefused`.
    """
    plan = _plan(run, name)
    rounds = set(run.checkpoints.values_list("round", flat=True))
    if not rounds:
        raise ActionRefused("expected a checkpoint, found none yet")
    number = max(rounds) if round is None else round
    if number not in rounds:
        raise ActionRefused(f"expected a round with a checkpoint, found {number}")
    now = timezone.now()
    again = {"state": State.QUEUED, "created_at": now, "next_at": now, "ended_at": None}
    again |= {"failures": 0, "message": "", "retrying_since": None}
    ended = plan.evaluations.filter(
        round=number, state__in=(State.FAILED, State.CANCELLED, State.SKIPPED)
    )
    with transaction.atomic():
        changed = bool(ended.update(**again))
        if not changed:
            changed = _create(plan, number)
        if changed:
            _record(run, f"{plan} of round {number} requested", actor)
            enqueue("evaluations_due")
    return changed


def _create(plan: EvaluationPlan, number: int) -> bool:
    now = timezone.now()
    try:
        with transaction.atomic():
            Evaluation.objects.create(
                plan=plan, run_id=plan.run_id, round=number, created_at=now, next_at=now
            )
    except IntegrityError:
        return False
    return True


def cancel(run: Run, name: str, round: int, *, actor: User) -> bool:
    """Cancel a queued or running evaluation. False if there is none."""
    plan = _plan(run, name)
    active = plan.evaluations.filter(round=round, state__in=(State.QUEUED, State.RUNNING))
    with transaction.atomic():
        changed = bool(active.update(state=State.CANCELLING, next_at=timezone.now()))
        if changed:
            _record(run, f"{plan} of round {round} is being cancelled", actor)
            enqueue("evaluations_due")
    return changed


def cancel_all(run: Run) -> bool:
    """Cancel all evaluations of a run that is deleted. False if none is active."""
    active = Evaluation.objects.filter(run=run, state__in=Evaluation.ACTIVE)
    active.exclude(state=State.CANCELLING).update(state=State.CANCELLING, next_at=timezone.now())
    return active.exists()


def _record(run: Run, message: str, actor: User) -> None:
    """Record an event, and have the change written to the journal."""
    record_event(run, "evaluation", message, actor=actor)
    mark_due(run)


def _plan(run: Run, name: str) -> EvaluationPlan:
    plans = run.evaluation_plans.filter(enabled=True)
    plan = plans.filter(name=name).first()
    if plan is None:
        known = ", ".join(plans.values_list("name", flat=True)) or "none yet"
        raise ActionRefused(f"expected an evaluation of the run ({known}), found {name[:80]!r}")
    return plan
