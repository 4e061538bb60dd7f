"""Change what is evaluated of a run's checkpoints; request, repeat and cancel evaluations.

Each change is an event of the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.utils import timezone

from diloco.protocol.evaluation import EvaluationSpec
from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import WORKLOADS
from runs.bulk import update_row
from runs.exceptions import ActionRefused, InvalidRun
from runs.local_access import refused_local
from runs.models import Credential, Evaluation, EvaluationAttempt, EvaluationPlan, Run
from runs.submit.create import check_pool
from runs.submit.data_check import refuse_data
from runs.submit.run_draft import PoolDraft
from runs.task_queue import enqueue
from runs.transitions import record_event

MOST_PLANS = 8
LONGEST_S = 7 * 86_400
MOST_ATTEMPTS = 10
MOST_EVERY = 10_000
NAME_CHARS = 24
_NAME = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{NAME_CHARS - 1}}}")
State = Evaluation.State


@dataclass(frozen=True, kw_only=True)
class PlanDraft:
    """Columns of a plan as a user enters them; ``credential`` is an id of that backend."""

    name: str
    spec: EvaluationSpec = field(default_factory=EvaluationSpec)
    every: int = 1
    backend: str = "local"
    hardware: str = "cpu"
    credential: int | None = None
    timeout_s: int = 3600
    max_attempts: int = 3


def spec_of(**values: object) -> EvaluationSpec:
    """The specification. Raises :class:`InvalidRun` for the field that is wrong."""
    try:
        return EvaluationSpec(**values)  # type: ignore[arg-type]
    except SettingsError as error:
        raise InvalidRun(error.field, error.message) from error


def save_plan(run: Run, draft: PlanDraft, *, actor: User) -> EvaluationPlan:
    """Add a plan to the run, or change the one with that name.

    Results of one plan are comparable, so a plan that has evaluations keeps its data and tasks.
    Raises :class:`InvalidRun` with the fields that are wrong.
    """
    _check(run, draft, actor)
    spec = asdict(draft.spec) | {"tasks": list(draft.spec.tasks)}
    columns = {
        name: getattr(draft, name)
        for name in ("every", "backend", "hardware", "timeout_s", "max_attempts")
    }
    columns |= {"credential_id": draft.credential, "created_by": actor, "considered": 0}
    with transaction.atomic():
        Run.objects.select_for_update().get(pk=run.pk)
        plan = EvaluationPlan.objects.filter(run=run, name=draft.name).first()
        if plan is None:
            if run.evaluation_plans.filter(enabled=True).count() >= MOST_PLANS:
                raise InvalidRun("name", f"a run can have {MOST_PLANS} evaluations; remove one")
            plan = EvaluationPlan(run=run, name=draft.name, created_at=timezone.now())
            done = "added"
        else:
            if plan.spec != spec and plan.evaluations.exists():
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
        plan.spec, plan.enabled = spec, True
        for name, value in columns.items():
            setattr(plan, name, value)
        plan.save()
        record_event(run, "evaluation", f"{plan} {done}", actor=actor)
        enqueue("evaluations_due")
    return plan


def _check(run: Run, draft: PlanDraft, actor: User) -> None:
    if not _NAME.fullmatch(draft.name):
        raise InvalidRun(
            "name",
            f"enter up to {NAME_CHARS} lower-case letters, digits and hyphens, found "
            f"{draft.name[:60]!r}",
        )
    for name, value, least, most in (
        ("every", draft.every, 0, MOST_EVERY),
        ("timeout_s", draft.timeout_s, 60, LONGEST_S),
        ("max_attempts", draft.max_attempts, 1, MOST_ATTEMPTS),
    ):
        if not least <= value <= most:
            raise InvalidRun(name, f"enter {least:,} to {most:,}, found {value:,}")
    try:
        check_pool(
            PoolDraft(backend=draft.backend, hardware=draft.hardware, credential=draft.credential)
        )
    except InvalidRun as error:
        raise InvalidRun(error.field.rpartition(".")[2], error.message) from None
    if problem := refused_local(actor, draft.backend, run.workload):
        raise InvalidRun("backend", problem)
    if draft.spec.data and (problem := refuse_data(draft.spec.data)):
        raise InvalidRun("data", problem)
    workload = WORKLOADS.get(run.workload.get("kind", ""))
    has_tokens = workload is not None and workload.is_language_model
    if not has_tokens and (draft.spec.data or draft.spec.tasks):
        raise InvalidRun(
            "data" if draft.spec.data else "tasks",
            "leave data and tasks empty: this workload is evaluated on its own data, because "
            "its tokenizer is not known",
        )


def remove_plan(run: Run, name: str, *, actor: User) -> bool:
    """Remove a plan and its evaluations; their points stay in charts. False if there is none.

    A plan whose jobs cost something is only hidden: the run, its budgets and the spending of its
    owner have these costs. Raises :class:`ActionRefused` while an evaluation of the plan has a job.
    """
    plan = EvaluationPlan.objects.filter(run=run, name=name, enabled=True).first()
    if plan is None:
        return False
    if plan.evaluations.filter(state__in=Evaluation.WITH_JOB).exists():
        raise ActionRefused(f"cancel the running evaluation of {plan} first")
    with transaction.atomic():
        if EvaluationAttempt.objects.filter(evaluation__plan=plan).exists():
            queued = plan.evaluations.filter(state=State.QUEUED)
            queued.update(state=State.CANCELLED, ended_at=timezone.now())
            update_row(plan, enabled=False)
        else:
            plan.delete()
        record_event(run, "evaluation", f"{name} removed", actor=actor)
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
    again |= {"failures": 0, "message": ""}
    ended = plan.evaluations.filter(
        round=number, state__in=(State.FAILED, State.CANCELLED, State.SKIPPED)
    )
    with transaction.atomic():
        changed = bool(ended.update(**again))
        if not changed:
            changed = _create(plan, number)
        if changed:
            record_event(run, "evaluation", f"{plan} of round {number} requested", actor=actor)
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
            message = f"{plan} of round {round} is being cancelled"
            record_event(run, "evaluation", message, actor=actor)
            enqueue("evaluations_due")
    return changed


def cancel_all(run: Run) -> bool:
    """Cancel all evaluations of a run that is deleted. False if none is active."""
    active = Evaluation.objects.filter(run=run, state__in=Evaluation.ACTIVE)
    active.exclude(state=State.CANCELLING).update(state=State.CANCELLING, next_at=timezone.now())
    return active.exists()


def credential_id(backend: str, name: str) -> int | None:
    """The id of a credential by its name, None for ''. Raises :class:`InvalidRun`."""
    if not name:
        return None
    found: Iterable[int] = Credential.objects.filter(kind=backend, name=name).values_list(
        "pk", flat=True
    )
    for pk in found:
        return pk
    raise InvalidRun("credential", f"expected a credential for {backend}, found {name[:80]!r}")


def _plan(run: Run, name: str) -> EvaluationPlan:
    plans = run.evaluation_plans.filter(enabled=True)
    plan = plans.filter(name=name).first()
    if plan is None:
        known = ", ".join(plans.values_list("name", flat=True)) or "none yet"
        raise ActionRefused(f"expected an evaluation of the run ({known}), found {name[:80]!r}")
    return plan
