"""Checks requested evaluations of checkpoints, and makes their rows.

A run can have them from its creation, and a user can add others later
(:mod:`runs.actions.evaluations`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from django.contrib.auth.models import User

from diloco.protocol.evaluation import EvaluationSpec
from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import WORKLOADS
from runs.exceptions import InvalidRun
from runs.json_values import mapping
from runs.models import EvaluationPlan, Run
from runs.submit.data_check import refuse_data
from runs.submit.pool_check import check_pool
from runs.submit.run_draft import PlanDraft, PoolDraft, spec_values

MOST_PLANS = 8
LONGEST_S = 7 * 86_400
MOST_ATTEMPTS = 10
MOST_EVERY = 10_000
NAME_CHARS = 24
COLUMNS = ("every", "backend", "hardware", "timeout_s", "max_attempts")
_NAME = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{NAME_CHARS - 1}}}")


def spec_of(**values: object) -> EvaluationSpec:
    """The specification. Raises :class:`InvalidRun` for the field that is wrong."""
    try:
        return EvaluationSpec(**values)  # type: ignore[arg-type]
    except SettingsError as error:
        raise InvalidRun(error.field, error.message) from error


def draft_of(plan: EvaluationPlan) -> PlanDraft:
    """The plan of a run as a draft for another run."""
    return PlanDraft(
        name=plan.name,
        spec=EvaluationSpec.from_dict(mapping(plan.spec)),
        credential=plan.credential_id,
        **{name: getattr(plan, name) for name in COLUMNS},
    )


def new_plan(run: Run, draft: PlanDraft, *, actor: User, now: datetime) -> EvaluationPlan:
    """The row of a checked draft, which is not saved yet."""
    plan = EvaluationPlan(run=run, name=draft.name, created_at=now)
    put(draft, plan, actor=actor)
    return plan


def put(draft: PlanDraft, plan: EvaluationPlan, *, actor: User) -> None:
    """Set the columns of a plan, so that it considers all checkpoints of its run again."""
    for name in COLUMNS:
        setattr(plan, name, getattr(draft, name))
    plan.spec, plan.credential_id = spec_values(draft.spec), draft.credential
    plan.created_by, plan.considered, plan.enabled = actor, 0, True


def check_plans(drafts: Sequence[PlanDraft], workload: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidRun` for ``evaluations.<index>.<field>``."""
    if len(drafts) > MOST_PLANS:
        raise InvalidRun(
            "evaluations", f"a run can have {MOST_PLANS} evaluations, found {len(drafts)}"
        )
    names: set[str] = set()
    for index, draft in enumerate(drafts):
        try:
            check_plan(draft, workload)
            if draft.name in names:
                raise InvalidRun("name", "enter another name; the run has this one")
        except InvalidRun as error:
            raise InvalidRun(f"evaluations.{index}.{error.field}", error.message) from None
        names.add(draft.name)


def check_plan(draft: PlanDraft, workload: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidRun` for the field that is wrong. Permissions are not checked."""
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
    if draft.spec.data and (problem := refuse_data(draft.spec.data)):
        raise InvalidRun("data", problem)
    kind = WORKLOADS.get(str(workload.get("kind")))
    has_tokens = kind is not None and kind.is_language_model
    if not has_tokens and (draft.spec.data or draft.spec.tasks):
        raise InvalidRun(
            "data" if draft.spec.data else "tasks",
            "leave data and tasks empty: this workload is evaluated on its own data, because "
            "its tokenizer is not known",
        )
