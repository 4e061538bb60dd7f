"""Restores the evaluations of an imported run: plans and jobs from its journal, results from its
bucket.

A plan goes on as before: new checkpoints are evaluated, a job that runs is polled. A plan or an
evaluation that is wrong is left out with a remark and does not prevent the import of its run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django.utils import timezone

from diloco.protocol import keys
from diloco.protocol.evaluation import EvaluationResult, EvaluationSpec
from diloco.protocol.parallel_reads import read_each
from diloco.protocol.parsing import abridged
from diloco.protocol.records import BadRecord
from diloco.store.base import Store
from runs.evaluations.jobs import launch_prefix
from runs.evaluations.results import points_of, result_columns
from runs.exceptions import ActionRefused, InvalidRun
from runs.ingest import journal_tables
from runs.json_values import mapping
from runs.metrics.downsampling import add_points
from runs.models import Checkpoint, Credential, Evaluation, EvaluationAttempt, EvaluationPlan, Run
from runs.restore.columns import columns
from runs.restore.journal_reader import JournalState
from runs.submit.evaluation_plans import MOST_PLANS, check_plan, draft_of
from runs.submit.run_draft import spec_values

MOST_STORED = 100
"""Plans of a run with removed ones, which remain for their costs."""

State = Evaluation.State
Place = tuple[str, int]
"""Plan and round."""
FindCredential = Callable[[Any, str], Credential | None]


@dataclass(frozen=True, kw_only=True)
class EvaluationImport:
    """What is read before rows are stored: plans by name, and the results in the bucket."""

    plans: Mapping[str, EvaluationPlan]
    results: Mapping[Place, EvaluationResult]


def read_evaluations(
    run: Run,
    store: Store,
    journal_state: JournalState,
    remarks: list[str],
    find_credential: FindCredential,
) -> EvaluationImport:
    """Check the plans of the journal, and read the results of their evaluations."""
    plans: dict[str, EvaluationPlan] = {}
    for name, body in journal_state.evaluation_plans.items():
        enabled = sum(plan.enabled for plan in plans.values())
        try:
            plan = _plan(run, body, find_credential)
            if len(plans) == MOST_STORED or (plan.enabled and enabled == MOST_PLANS):
                raise ActionRefused(f"a run can have {MOST_PLANS} evaluations")
        except (ActionRefused, InvalidRun) as error:
            remarks.append(f"evaluations {abridged(name)} are not imported: {error}")
        else:
            plans[name] = plan
    return EvaluationImport(plans=plans, results=_results(run, store, journal_state, plans))


def _plan(run: Run, body: journal_tables.Body, find_credential: FindCredential) -> EvaluationPlan:
    """The row of a plan, checked as one that a user enters. As a pool, a plan of another user has
    the permissions of the run's owner."""
    values = columns(EvaluationPlan, body, journal_tables.EVALUATION_PLAN.columns)
    plan = EvaluationPlan(run=run, **values)
    try:
        spec = EvaluationSpec.from_dict(mapping(plan.spec))
    except (ValueError, TypeError) as error:
        raise ActionRefused(str(error)) from None
    plan.spec = spec_values(spec)
    check_plan(draft_of(plan), run.workload)
    if body.get("credential"):
        plan.credential = find_credential(body["credential"], plan.backend)
    if body.get("created_by") == run.owner.get_username():
        plan.created_by = run.owner
    return plan


def _results(
    run: Run, store: Store, journal_state: JournalState, plans: Mapping[str, EvaluationPlan]
) -> dict[Place, EvaluationResult]:
    """The results of evaluations that succeeded, of the weights that the run had."""
    weights: dict[int, set[str]] = defaultdict(set)
    for number, digest in Checkpoint.objects.filter(run=run).values_list("round", "digest"):
        weights[number].add(digest)
    specs = {name: EvaluationSpec.from_dict(plan.spec) for name, plan in plans.items()}
    places = {
        place: keys.evaluation(place[1], specs[place[0]].name)
        for place, body in journal_state.evaluations.items()
        if body["state"] == State.SUCCEEDED and place[0] in plans and place[1] in weights
    }
    read = read_each(store, EvaluationResult, sorted(set(places.values())))
    results: dict[Place, EvaluationResult] = {}
    for (name, number), key in places.items():
        result = read.get(key)
        if result is None or isinstance(result, BadRecord):
            continue
        try:
            result.check(round=number, spec=specs[name])
        except BadRecord:
            continue
        if result.weights in weights[number]:
            results[name, number] = result
    return results


def store_evaluations(
    run: Run, imported: EvaluationImport, journal_state: JournalState, remarks: list[str]
) -> None:
    """Store plans, evaluations, attempts, and the points of the results."""
    for plan in imported.plans.values():
        plan.save(force_insert=True)
    rows: dict[Place, Evaluation] = {}
    for place, body in journal_state.evaluations.items():
        if place[0] not in imported.plans:
            continue
        plan_of_row, result = imported.plans[place[0]], imported.results.get(place)
        try:
            rows[place] = _evaluation(plan_of_row, body, result, remarks)
        except ActionRefused as error:
            remarks.append(f"the evaluation {abridged(place)} is not imported: {error}")
    attempts = _attempts(rows, journal_state, remarks)
    with_job = {(attempt.evaluation.plan.name, attempt.evaluation.round) for attempt in attempts}
    for place, row in rows.items():
        if row.state == State.RUNNING and place not in with_job:
            row.state = State.QUEUED
    Evaluation.objects.bulk_create(rows.values())
    EvaluationAttempt.objects.bulk_create(attempts)
    _store_points(run, imported.results, rows)


def written_names(run: Run) -> dict[str, dict[str, str]]:
    """The rows as the state of a journal has them, so that it names those that are deleted."""
    plans = run.evaluation_plans.values_list("name", flat=True)
    rows = map(journal_tables.evaluation_name, run.evaluations.select_related("plan"))
    return {"evaluation_plans": dict.fromkeys(plans, ""), "evaluations": dict.fromkeys(rows, "")}


def _evaluation(
    plan: EvaluationPlan,
    body: journal_tables.Body,
    result: EvaluationResult | None,
    remarks: list[str],
) -> Evaluation:
    row = Evaluation(
        plan=plan,
        run=plan.run,
        next_at=timezone.now(),
        **columns(Evaluation, body, journal_tables.EVALUATION.columns),
    )
    if row.state == State.SUCCEEDED and result is not None:
        for name, value in result_columns(result).items():
            setattr(row, name, value)
    elif row.state == State.SUCCEEDED:
        remarks.append(f"{plan} of round {row.round}: the result is not in the bucket")
        row.state = State.QUEUED if plan.enabled else State.CANCELLED
        row.ended_at = None if plan.enabled else row.ended_at
    return row


def _attempts(
    rows: Mapping[Place, Evaluation], journal_state: JournalState, remarks: list[str]
) -> list[EvaluationAttempt]:
    """The attempts of these evaluations. The log of their jobs is not in the journal."""
    attempts: dict[tuple[str, int, int], EvaluationAttempt] = {}
    for key, body in journal_state.evaluation_attempts.items():
        place = body["plan"], body["round"]
        row = rows.get(place)
        if row is None:
            continue  # a remark has the evaluation or its plan, or they were deleted
        try:
            attempt = EvaluationAttempt(
                evaluation=row,
                **columns(EvaluationAttempt, body, journal_tables.EVALUATION_ATTEMPT.columns),
            )
            if not key.startswith(launch_prefix(row.run)) or (*place, attempt.number) in attempts:
                raise ActionRefused("expected a launch key of this run, and each attempt once")
        except ActionRefused as error:
            remarks.append(f"the attempt {abridged(key)} of an evaluation is not imported: {error}")
        else:
            attempts[*place, attempt.number] = attempt
    return list(attempts.values())


def _store_points(
    run: Run, results: Mapping[Place, EvaluationResult], rows: Mapping[Place, Evaluation]
) -> None:
    for place in sorted(results.keys() & rows.keys()):
        add_points(run, None, points_of(rows[place], results[place]), key="round")
