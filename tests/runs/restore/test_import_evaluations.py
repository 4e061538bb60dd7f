"""Evaluations of an imported run: plans, results, costs, and the job that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from diloco.protocol import keys
from executors.base import Cause
from runs.actions import evaluations
from runs.evaluations import schedule
from runs.ingest import journal
from runs.models import Evaluation, EvaluationAttempt, EvaluationPlan, Journal, Run
from runs.restore.import_run import import_run
from runs.restore.journal_reader import read_journal
from tests.matrix import matrix
from tests.runs.evaluations.evaluation_harness import Evaluations, connect
from tests.runs.rows import ROWS, rows
from tests.runs.run_harness import DIGEST, incarnation, person

pytestmark = pytest.mark.django_db
State = Evaluation.State


class Imports(Evaluations):
    """A run with evaluations, whose rows can be deleted and imported."""

    def __init__(self, harness: Any) -> None:
        super().__init__(harness.run, harness.executor, harness.clock)
        self.harness = harness

    def commit(self, round: int) -> None:
        """Commit rounds up to ``round`` and write its checkpoint."""
        bucket = self.harness.bucket
        for number in range(self.run.next_round, round + 1):
            bucket.plan(number, (0, 1))
            bucket.commit(number, (0, 1))
        bucket.checkpoint(round)
        folder = keys.checkpoint_dir(round, 0, incarnation(0))
        self.store.put(f"{folder}weights.safetensors", b"weights")
        self.harness.tick()

    def succeed(self, round: int, loss: float) -> None:
        self.write(round, loss, weights=DIGEST)
        self.end()
        self.tick()

    def write_journal(self) -> None:
        """Write the journal, as the reconciler does while it is due."""
        assert journal.is_write_due(self.run, now=timezone.now())
        journal.write_journal(self.run, self.store, now=timezone.now(), changed=False)

    def import_again(self) -> tuple[str, ...]:
        """Delete the rows and import the run; return the remarks."""
        Run.objects.filter(pk=self.run.pk).delete()
        imported = import_run(self.run.rendezvous)
        self.run = self.harness.run = imported.run
        return imported.remarks


@pytest.fixture
def imports(
    make_harness: Callable[..., Any], executor: Any, monkeypatch: pytest.MonkeyPatch
) -> Imports:
    connect(monkeypatch, executor)
    harness = make_harness(replicas=2)
    harness.start()
    made = Imports(harness)
    made.plan()
    made.commit(1)
    made.tick()
    made.tick()
    EvaluationAttempt.objects.update(price_usd_h=36.0)
    return made


def test_evaluations_are_the_same_row_by_row(imports: Imports) -> None:
    imports.tick()
    imports.succeed(1, 2.5)
    imports.commit(2)
    imports.tick()
    imports.tick()
    imports.end(Cause.ERROR, code=1)
    imports.tick()
    imports.plan(name="bench", every=0)
    imports.write_journal()
    before = rows(imports.run)
    assert [len(before[name]) for name in ROWS if "Evaluation" in name] == [2, 2, 2]
    cost = EvaluationAttempt.objects.get(number=1, evaluation__round=1).cost_usd
    assert cost
    assert imports.import_again() == ()
    after = rows(imports.run)
    for name in ("EvaluationPlan", "Evaluation", "EvaluationAttempt", "MetricBlock"):
        assert after[name] == before[name], name
    assert imports.points() == [(1, 2.5)]
    assert imports.run.cost_usd >= cost
    before_again = after
    imports.harness.tick()
    imports.import_again()
    assert rows(imports.run)["Evaluation"] == before_again["Evaluation"]


def test_a_running_evaluation_and_its_plan_go_on(imports: Imports) -> None:
    imports.write_journal()
    launches, key = imports.executor.launches, imports.key()
    assert imports.import_again() == ()
    assert imports.states() == {1: State.RUNNING}
    imports.tick()
    assert imports.key() == key
    imports.succeed(1, 2.5)
    assert imports.points() == [(1, 2.5)]
    assert imports.executor.launches == launches
    imports.commit(2)
    imports.tick()
    assert imports.states() == {1: State.SUCCEEDED, 2: State.RUNNING}


def test_a_job_that_the_journal_does_not_have_is_found_by_its_launch_key(imports: Imports) -> None:
    """The database was lost between the launch and the next write of the journal."""
    attempt = EvaluationAttempt.objects.get()
    Evaluation.objects.update(state=State.QUEUED)
    launch_key = attempt.launch_key
    attempt.delete()
    imports.write_journal()
    launches = imports.executor.launches
    imports.import_again()
    imports.tick()
    assert imports.key() == launch_key
    imports.succeed(1, 2.5)
    assert imports.states() == {1: State.SUCCEEDED}
    assert imports.executor.launches == launches


def test_a_deleted_plan_is_not_imported(imports: Imports) -> None:
    imports.plan(name="bench", every=0)
    imports.write_journal()
    assert imports.import_again() == ()
    assert evaluations.remove_plan(imports.run, "bench", actor=imports.run.owner)
    imports.write_journal()
    imports.import_again()
    assert [plan.name for plan in imports.run.evaluation_plans.all()] == ["val"]


def test_a_removed_plan_keeps_its_costs_hidden(imports: Imports) -> None:
    imports.succeed(1, 2.5)
    assert evaluations.remove_plan(imports.run, "val", actor=imports.run.owner)
    imports.write_journal()
    imports.import_again()
    assert not imports.run.evaluation_plans.get().enabled
    assert EvaluationAttempt.objects.get().cost_usd
    imports.commit(2)
    schedule.call_for_due()
    assert imports.states() == {1: State.SUCCEEDED}


def test_a_result_that_is_not_in_the_bucket_is_measured_again(imports: Imports) -> None:
    imports.succeed(1, 2.5)
    imports.write_journal()
    imports.store.delete([info.key for info in imports.store.list(keys.EVALUATIONS)])
    [remark] = imports.import_again()
    assert remark == "val of round 1: the result is not in the bucket"
    assert imports.states() == {1: State.QUEUED}
    imports.tick()
    imports.tick()
    imports.succeed(1, 2.25)
    assert imports.points() == [(1, 2.25)]


def test_a_plan_of_another_user_has_the_permissions_of_the_owner(imports: Imports) -> None:
    EvaluationPlan.objects.update(created_by=person("mia", "admin"))
    imports.write_journal()
    imports.import_again()
    assert imports.run.evaluation_plans.get().created_by is None


@matrix(
    ("kind", "change", "reason"),
    [
        ("evaluation_plans", {"name": "../x"}, "enter up to 24 lower-case letters"),
        ("evaluation_plans", {"backend": "nowhere"}, "expected a backend of"),
        ("evaluation_plans", {"spec": {"tokens": -1}}, "enter a whole number from 0"),
        ("evaluation_plans", {"spec": {"tasks": 5}}, "not iterable"),
        ("evaluations", {"state": "glorious"}, "is not a valid choice"),
        ("evaluation_attempts", {"launch_key": "0-1-1"}, "expected a launch key of this run"),
        ("evaluation_attempts", {"launch_key": "x" * 99}, "at most 80 characters"),
    ],
    fast=2,
)
def test_a_wrong_row_is_a_remark_and_the_run_is_imported(
    imports: Imports, kind: str, change: dict[str, Any], reason: str
) -> None:
    imports.write_journal()
    found = read_journal(imports.store)
    [body] = getattr(found, kind).values()
    entry = journal.Entry(n=found.next_n, wall_s=0.0, **{kind: ({**body, **change},)})
    imports.store.create(keys.journal(found.next_n), entry.to_bytes())
    remarks = imports.import_again()
    assert any(reason in remark for remark in remarks), remarks
    assert imports.run.events.filter(kind="import").exists()


def test_more_plans_than_a_run_can_have_are_remarks(imports: Imports) -> None:
    imports.write_journal()
    found = read_journal(imports.store)
    [body] = found.evaluation_plans.values()
    plans = tuple({**body, "name": f"p{number}"} for number in range(20))
    entry = journal.Entry(n=found.next_n, wall_s=0.0, evaluation_plans=plans)
    imports.store.create(keys.journal(found.next_n), entry.to_bytes())
    remarks = imports.import_again()
    assert imports.run.evaluation_plans.count() == 8
    assert sum("a run can have 8 evaluations" in remark for remark in remarks) == 13


def test_an_ended_run_writes_its_evaluations(imports: Imports) -> None:
    """The reconciler visits an ended run only while its journal is due."""
    imports.write_journal()
    assert not Journal.objects.get(run=imports.run).due
    imports.succeed(1, 2.5)
    assert Journal.objects.get(run=imports.run).due


def test_an_earlier_version_reads_a_journal_without_evaluations() -> None:
    entry = journal.Entry(n=1, wall_s=0.0, replicas=({"number": 0, "pool": 0},))
    assert b"evaluation" not in entry.to_bytes()
    assert journal.Entry.from_bytes(entry.to_bytes()) == entry
