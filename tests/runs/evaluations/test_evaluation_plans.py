"""Plans of evaluations, what they cost, and the budgets that hold them."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from django.utils import timezone

from diloco.protocol.evaluation import EvaluationSpec
from runs.actions import evaluations
from runs.evaluations import schedule
from runs.evaluations.schedule import wanted_rounds
from runs.exceptions import ActionRefused, InvalidRun
from runs.models import Evaluation, EvaluationAttempt, Run
from runs.queries.evaluations import evaluation_rows, plan_rows
from runs.states import RunState
from tests.runs.evaluations.evaluation_harness import Evaluations


def test_a_plan_with_a_job_keeps_its_backend(harness: Evaluations) -> None:
    """The next step would look for the job on the other backend."""
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    with pytest.raises(InvalidRun, match="cancel the evaluation of val that runs on local first"):
        harness.plan(backend="modal", hardware="L4")
    harness.plan(every=2)
    harness.write(5, 2.0)
    harness.end()
    harness.tick()
    assert harness.plan(backend="modal", hardware="L4").backend == "modal"


def test_a_plan_has_no_series_of_a_plan_whose_name_it_begins(harness: Evaluations) -> None:
    for name in ("val", "val-2"):
        harness.plan(name=name)
    harness.checkpoint(5)
    harness.write(5, 2.5)
    harness.tick()
    assert {row["name"]: row["series"] for row in plan_rows(harness.run)} == {
        "val": ["eval-val-loss", "eval-val-perplexity"],
        "val-2": ["eval-val-2-loss", "eval-val-2-perplexity"],
    }


def test_the_cost_is_part_of_the_runs(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    EvaluationAttempt.objects.update(price_usd_h=3600.0)
    harness.tick()
    harness.tick()
    harness.run.refresh_from_db()
    assert harness.run.cost_usd > 0
    attempt = EvaluationAttempt.objects.get()
    assert attempt.cost_usd == pytest.approx(harness.run.cost_usd)


def test_the_cost_counts_in_spending_and_in_budgets(harness: Evaluations) -> None:
    from runs.queries.attempt_costs import Period
    from runs.queries.budgets import spending_since
    from runs.queries.live_jobs import JobFilter
    from runs.queries.spend import spend

    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    begun = harness.clock()
    EvaluationAttempt.objects.update(price_usd_h=36.0)
    harness.clock.pass_s(100.0)
    harness.tick()
    harness.write(5, 2.0)
    harness.end()
    harness.tick()
    now, user = harness.clock(), harness.run.owner
    cost = EvaluationAttempt.objects.get().cost_usd
    assert cost == pytest.approx(1.05, abs=0.05)
    assert spending_since(begun.date(), now).owners["olga"].usd == pytest.approx(cost)
    day = Period(first=begun.date(), last=begun.date())
    for chosen, expected in (
        (JobFilter(), cost),
        (JobFilter(backend="local", owner="olga"), cost),
        (JobFilter(backend="modal"), 0.0),
        (JobFilter(owner="oscar"), 0.0),
    ):
        assert spend(user, day, chosen, now=now)["total"]["usd"] == pytest.approx(expected)
    harness.plan(backend="modal", hardware="L4")  # the next job's, not that of this one
    for backend, expected in (("local", cost), ("modal", 0.0)):
        of_backend = spend(user, day, JobFilter(backend=backend), now=now)
        assert of_backend["total"]["usd"] == pytest.approx(expected)
    # Half of the job ran before midnight.
    midnight = datetime.datetime.combine(begun.date(), datetime.time(), datetime.UTC)
    half = datetime.timedelta(seconds=100)
    EvaluationAttempt.objects.update(
        created_at=midnight - half,
        launched_at=midnight - half,
        started_at=midnight - half,
        ended_at=midnight + half,
    )
    assert spending_since(begun.date(), now).owners["olga"].usd == pytest.approx(cost / 2)


def test_a_removed_plan_leaves_its_costs(harness: Evaluations) -> None:
    from runs.queries.budgets import spending_since
    from runs.reconcile.billing import update_total

    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    EvaluationAttempt.objects.update(price_usd_h=36.0)
    harness.clock.pass_s(100.0)
    harness.tick()
    harness.write(5, 2.0)
    harness.end()
    harness.tick()
    cost = EvaluationAttempt.objects.get().cost_usd
    assert cost
    harness.checkpoint(10)
    schedule.call_for_due()
    assert evaluations.remove_plan(harness.run, "val", actor=harness.run.owner)
    assert plan_rows(harness.run) == evaluation_rows(harness.run) == []
    assert harness.states() == {5: "succeeded", 10: "cancelled"}
    harness.run.refresh_from_db()
    update_total(harness.run)
    assert harness.run.cost_usd == pytest.approx(cost)
    spent = spending_since(harness.clock().date(), harness.clock())
    assert spent.owners["olga"].usd == pytest.approx(cost)
    # The points of the chart stay comparable.
    with pytest.raises(InvalidRun, match="enter another name: val has results of other data"):
        harness.plan(spec=EvaluationSpec(tokens=1))
    harness.plan()
    assert len(evaluation_rows(harness.run)) == 2


def test_a_spent_budget_holds_evaluations(harness: Evaluations) -> None:
    Run.objects.filter(pk=harness.run.pk).update(budget_usd=1.0, cost_usd=2.0)
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.message) == ("queued", "the run's budget of $1.00 is spent")
    assert harness.executor.launches == 0


def test_a_plan_of_a_run_that_ended_long_ago(harness: Evaluations) -> None:
    long_ago = timezone.now() - datetime.timedelta(days=30)
    Run.objects.filter(pk=harness.run.pk).update(state=RunState.SUCCEEDED, ended_at=long_ago)
    harness.checkpoint(5, final=True)
    harness.plan()
    harness.tick()
    assert harness.states() == {5: "running"}


def test_an_added_plan_evaluates_what_is_kept(harness: Evaluations) -> None:
    for number in (0, 5, 10, 15, 20):
        harness.checkpoint(number)
    harness.plan(every=2)
    harness.tick()
    assert sorted(harness.states()) == [20]


@pytest.mark.parametrize(
    ("written", "every", "expected"),
    [
        ([], 1, []),
        ([(0, False)], 1, []),
        ([(0, False), (5, False)], 1, [5]),
        ([(0, False), (5, False), (10, False), (15, False)], 1, [10, 15]),
        ([(0, False), (5, False), (10, False), (15, False)], 2, [10]),
        ([(5, False), (10, False), (10, True)], 1, [5, 10]),
        ([(5, False), (10, False), (15, False), (17, True)], 2, [10, 17]),
        ([(0, True)], 1, []),
    ],
)
def test_rounds_that_a_plan_wants(
    written: list[tuple[int, bool]], every: int, expected: list[int]
) -> None:
    assert wanted_rounds(written, every=every) == expected


@pytest.mark.parametrize(
    ("columns", "field", "message"),
    [
        ({"name": "My plan"}, "name", "lower-case letters, digits and hyphens"),
        ({"every": 10_001}, "every", "enter 0 to 10,000, found 10,001"),
        ({"timeout_s": 5}, "timeout_s", "enter 60 to 604,800, found 5"),
        ({"max_attempts": 0}, "max_attempts", "enter 1 to 10"),
        ({"backend": "moon"}, "backend", "expected a backend of"),
        ({"hardware": "h900"}, "hardware", "expected one of"),
        ({"credential": 999}, "credential", "expected a credential for local"),
        ({"spec": EvaluationSpec(data="ftp://x/y")}, "data", "ftp"),
    ],
)
def test_a_wrong_plan_is_refused_with_its_field(
    harness: Evaluations, columns: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidRun) as refused:
        harness.plan(**columns)
    assert refused.value.field == field
    assert message in refused.value.message
    assert not harness.run.evaluation_plans.exists()


def test_a_plan_with_results_keeps_what_it_measures(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    harness.plan(every=3)
    with pytest.raises(InvalidRun, match="has results of other data or tasks"):
        harness.plan(spec=EvaluationSpec(tasks=("arc_easy",)))
    with pytest.raises(ActionRefused, match="cancel the running evaluation"):
        evaluations.remove_plan(harness.run, "val", actor=harness.run.owner)


def test_at_most_eight_plans(harness: Evaluations) -> None:
    for number in range(8):
        harness.plan(name=f"p{number}")
    with pytest.raises(InvalidRun, match="a run can have 8 evaluations"):
        harness.plan(name="p8")
