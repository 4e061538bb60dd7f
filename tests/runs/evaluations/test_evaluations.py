"""Evaluations of checkpoints: queued once, one job, one result, whatever dies when."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.utils import timezone

from diloco.exit_codes import EX_CONFIG
from diloco.protocol import keys
from diloco.protocol.evaluation import EvaluationMetric, EvaluationResult, EvaluationSpec
from diloco.store.base import Store, StoreUnavailable
from executors.base import AccountError, Cause, LaunchRefused
from runs.actions import deletion, evaluations
from runs.actions.evaluations import PlanDraft
from runs.backends.code_bundle import CodeBundle
from runs.evaluations import advance, jobs, schedule
from runs.evaluations.schedule import wanted_rounds
from runs.exceptions import ActionRefused, InvalidRun, LaunchLater
from runs.metrics import charts
from runs.models import Checkpoint, Evaluation, EvaluationAttempt, Run
from runs.queries.evaluations import evaluation_rows, plan_rows
from runs.reconcile.orphan_reaper import orphans
from runs.states import RunState
from tests.runs import run_harness as w

DIGEST = "d" * 64


class Killed(BaseException):
    """The worker was killed: no handler of the product sees it."""


class Evaluations:
    """A run with checkpoints, its bucket, and a backend whose jobs end when the test ends them."""

    def __init__(self, run: Run, executor: w.FakeExecutor, clock: w.Clock) -> None:
        from runs.ingest.stores import store_for

        self.run, self.executor, self.clock = run, executor, clock
        self.store = store_for(run)

    def checkpoint(self, round: int, *, final: bool = False, weights: bool = True) -> None:
        folder = keys.checkpoint_dir(round, 0, w.incarnation(0))
        key = f"{folder}weights.safetensors"
        if final:
            key = f"{keys.final_dir(0, w.incarnation(0))}model.safetensors"
        if weights:
            self.store.put(key, b"weights")
        Checkpoint.objects.create(
            run=self.run, round=round, final=final, key=key, size_bytes=7, digest=DIGEST,
            created_at=timezone.now(),
        )  # fmt: skip

    def plan(self, **columns: Any) -> Any:
        draft = PlanDraft(**({"name": "val"} | columns))
        return evaluations.save_plan(self.run, draft, actor=self.run.owner)

    def tick(self) -> None:
        """Queue what is new, and make each step that is due."""
        schedule.call_for_due()
        active = Evaluation.objects.filter(run=self.run, state__in=Evaluation.ACTIVE)
        for pk in active.order_by("round").values_list("pk", flat=True):
            advance.advance(pk)
        self.clock.pass_s(3)

    def key(self) -> str:
        """The launch key of the newest attempt."""
        return str(EvaluationAttempt.objects.order_by("-pk").values_list("launch_key")[0][0])

    def write(self, at: int, loss: float, **changes: Any) -> None:
        """Write the result of round ``at``, with ``changes``."""
        values: dict[str, Any] = {
            "round": at,
            "spec": EvaluationSpec().name,
            "weights": DIGEST,
            "data": "",
            "metrics": (
                EvaluationMetric(name="loss", value=loss, stderr=0.1),
                EvaluationMetric(name="perplexity", value=10.0 * loss),
            ),
            "tokens": 100,
            "harness": "",
            "device": "cpu",
            "seconds": 1.0,
            "wall_s": self.clock().timestamp(),
        }
        result = EvaluationResult(**(values | changes))
        self.store.put(keys.evaluation(at, EvaluationSpec().name), result.to_bytes())

    def end(self, cause: Cause = Cause.DONE, *, code: int = 0) -> None:
        self.executor.end(self.key(), cause, code=code)

    def states(self) -> dict[int, str]:
        found = Evaluation.objects.filter(run=self.run)
        return {row.round: row.state for row in found}

    def points(self, series: str = "eval-val-loss") -> list[tuple[int, float]]:
        curves = charts.read(self.run, [(series, None)], charts.Window(max_points=10**6))
        points = [c.points for c in curves]
        return [(int(r), float(v)) for p in points for r, v in zip(p.round, p.value, strict=True)]

    def messages(self) -> list[str]:
        events = self.run.events.filter(kind="evaluation").order_by("pk")
        return [str(message) for message in events.values_list("message", flat=True)]


@pytest.fixture
def harness(
    make_run: Callable[..., Any], clock: w.Clock, executor: w.FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Evaluations]:  # fmt: skip
    for module in ("evaluations.jobs", "backends.attempt_log"):
        monkeypatch.setattr(f"runs.{module}.executor_of", lambda backend, credential: executor)
    bundle = CodeBundle(data=b"code", sha256="c" * 64)
    monkeypatch.setattr("runs.evaluations.jobs.make_bundle", lambda: bundle)
    monkeypatch.setattr("runs.live_stream.publish", lambda run_id, delta: True)
    for module in ("evaluations.schedule", "actions.evaluations"):
        monkeypatch.setattr(f"runs.{module}.enqueue", lambda task, *args, **more: None)
    run = make_run()
    Run.objects.filter(pk=run.pk).update(state=RunState.RUNNING)
    run.refresh_from_db()
    yield Evaluations(run, executor, clock)


def test_a_checkpoint_is_evaluated_and_drawn_once(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    entrypoint, arguments = harness.executor.args[harness.key()]
    assert entrypoint == "diloco.evaluate"
    assert arguments["args"][:3] == [harness.run.rendezvous, "--round", "5"]
    harness.tick()
    assert harness.states() == {5: "running"}
    harness.write(5, 2.5)
    harness.end()
    for _ in range(3):
        harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.metrics) == (
        "succeeded",
        {"loss": [2.5, 0.1], "perplexity": [25.0, None]},
    )
    assert harness.points() == [(5, 2.5)]
    assert harness.points("eval-val-perplexity") == [(5, 25.0)]
    assert harness.executor.launches == 1
    assert harness.messages() == ["val added", "val of round 5: loss 2.5"]
    assert EvaluationAttempt.objects.get().ended_at is not None


def test_two_evaluations_of_a_run_do_not_run_at_once(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.checkpoint(10)
    schedule.call_for_due()
    advance.advance(Evaluation.objects.get(round=10).pk)  # the newer one comes first
    assert harness.states() == {5: "queued", 10: "queued"}
    harness.clock.pass_s(3)
    harness.tick()
    harness.tick()
    assert harness.states() == {5: "running", 10: "queued"}
    harness.write(5, 2.0)
    harness.end()
    harness.tick()
    harness.tick()
    assert harness.states() == {5: "succeeded", 10: "running"}


@pytest.mark.parametrize("fatal", ["begin", "launched", "polled", "closed", "stored"])
def test_a_worker_that_is_killed_leaves_one_job_and_one_result(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch, fatal: str
) -> None:
    """Killed after each write or call; the next workers finish the evaluation."""
    calls = {
        "begin": (jobs, "begin_attempt"),
        "launched": (harness.executor, "ensure"),
        "polled": (harness.executor, "poll"),
        "closed": (jobs, "close"),
        "stored": (advance, "store_result"),
    }
    owner, name = calls[fatal]
    real = getattr(owner, name)
    alive = [True]

    def killed(*args: Any, **more: Any) -> Any:
        result = real(*args, **more)
        if alive:
            alive.clear()
            raise Killed
        return result

    monkeypatch.setattr(owner, name, killed)
    harness.plan()
    harness.checkpoint(5)
    for _ in range(4):
        try:
            harness.tick()
        except Killed:
            harness.clock.pass_s(advance.CLAIM.total_seconds() + 1)
        if harness.executor.jobs and not harness.store.list(keys.EVALUATIONS):
            harness.write(5, 2.5)
            harness.end()
    harness.tick()
    assert not alive
    assert harness.executor.launches == 1
    assert harness.states() == {5: "succeeded"}
    assert harness.points() == [(5, 2.5)]
    assert harness.messages() == ["val added", "val of round 5: loss 2.5"]
    assert EvaluationAttempt.objects.get().ended_at is not None


def test_a_failed_job_is_repeated_until_the_limit(harness: Evaluations) -> None:
    harness.plan(max_attempts=2)
    harness.checkpoint(5)
    for number in (1, 2):
        harness.tick()
        harness.tick()
        assert harness.executor.launches == number
        harness.end(Cause.OUT_OF_MEMORY, code=-9)
        harness.tick()
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.failures) == ("failed", 2)
    assert row.message == "the job wrote no result (out_of_memory, exit status -9)"
    assert evaluations.evaluate(harness.run, "val", actor=harness.run.owner, round=5)
    harness.tick()
    harness.write(5, 2.0)
    harness.end()
    harness.tick()
    assert harness.states() == {5: "succeeded"}


def test_a_permanent_error_is_not_repeated_and_its_reason_is_shown(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executors.base import LogLine

    lines = ["INFO reading", "error: data: expected token shards at s3://b/v, found none"]
    monkeypatch.setattr(
        harness.executor, "logs",
        lambda handle, **more: iter(LogLine(text=text, position="1") for text in lines),
    )  # fmt: skip
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    harness.end(Cause.ERROR, code=EX_CONFIG)
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert row.state == "failed"
    assert row.message == "data: expected token shards at s3://b/v, found none"
    assert "INFO reading" in row.attempts.get().log


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


def test_deleted_weights_are_skipped(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5, weights=False)
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert row.state == "skipped" and "were deleted" in row.message
    assert harness.executor.launches == 0


def test_a_result_that_the_bucket_has_needs_no_job(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.write(5, 1.5)
    harness.tick()
    assert harness.states() == {5: "succeeded"}
    assert harness.executor.launches == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "e" * 64}, "expected the result of the weights dddd"),
        ({"spec": "0" * 16}, "expected the result"),
        ({"round": 6}, "expected the result"),
        ({"metrics": ()}, "expected 1 to 200 metrics, found 0"),
        (
            {"metrics": (EvaluationMetric(name="loss", value=float("nan")),)},
            "loss: expected a finite number, found nan",
        ),
        (
            {"metrics": (EvaluationMetric(name="loss", value=1.0, stderr=float("inf")),)},
            "loss: expected a finite number, found inf",
        ),
        (
            {"metrics": (EvaluationMetric(name="<b>", value=1.0),)},
            "expected a metric's name of at most 64 letters",
        ),
        (
            {"metrics": (EvaluationMetric(name="loss", value=1.0),) * 2},
            "expected each metric once",
        ),
        (
            {"metrics": tuple(EvaluationMetric(name=f"m{n}", value=1.0) for n in range(201))},
            "expected 1 to 200 metrics, found 201",
        ),
        ({"device": "x" * 70_000}, "expected at most 65536 bytes"),
        ({"tokens": -1}, "expected 0 to"),
    ],
)
def test_an_untrusted_result_is_refused_by_name(
    harness: Evaluations, changes: dict[str, Any], message: str
) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    harness.write(5, 2.0, **changes)
    harness.end()
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.metrics) == ("failed", None)
    assert message in row.message
    assert harness.points() == []


def test_cancel_ends_the_job_first(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    assert evaluations.cancel(harness.run, "val", 5, actor=harness.run.owner)
    harness.tick()
    assert harness.executor.cancelled == [harness.key()]
    assert harness.states() == {5: "cancelling"}
    harness.end(Cause.CANCELLED)
    harness.tick()
    assert harness.states() == {5: "cancelled"}


def test_an_evaluation_that_is_cancelled_while_it_begins_has_no_job(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = jobs.begin_attempt

    def begin(row: Evaluation) -> EvaluationAttempt | None:
        assert evaluations.cancel(harness.run, "val", 5, actor=harness.run.owner)
        return real(row)

    monkeypatch.setattr(jobs, "begin_attempt", begin)
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    harness.tick()
    assert harness.states() == {5: "cancelled"}
    assert harness.executor.launches == 0


def test_two_workers_begin_one_evaluation_of_a_run(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second worker makes its step while the first has claimed, but not begun its own."""
    real = jobs.begin_attempt
    others = [10]

    def begin(row: Evaluation) -> EvaluationAttempt | None:
        if others:
            advance.advance(Evaluation.objects.get(round=others.pop()).pk)
        return real(row)

    monkeypatch.setattr(jobs, "begin_attempt", begin)
    harness.plan()
    harness.checkpoint(5)
    harness.checkpoint(10)
    schedule.call_for_due()
    advance.advance(Evaluation.objects.get(round=5).pk)
    assert sorted(harness.states().values()) == ["queued", "running"]
    assert harness.executor.launches == 1


def test_an_unavailable_backend_is_asked_again(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.executor.away = "no capacity in the region"
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.message) == ("running", "no capacity in the region")
    harness.executor.away = ""
    harness.clock.pass_s(10)
    harness.tick()
    assert harness.executor.launches == 1


def test_a_backend_that_stays_unavailable_does_not_hold_the_others(harness: Evaluations) -> None:
    harness.plan(every=0)
    harness.checkpoint(5)
    harness.executor.away = "no capacity in the region"
    evaluations.evaluate(harness.run, "val", actor=harness.run.owner)
    harness.tick()
    assert harness.states() == {5: "running"}
    harness.clock.pass_s(advance.GIVE_UP.total_seconds() + 1)
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.message) == ("failed", "no capacity in the region")
    # A repetition is tried as long as the first time.
    evaluations.evaluate(harness.run, "val", actor=harness.run.owner)
    harness.tick()
    assert harness.states() == {5: "running"}
    harness.executor.away = ""
    harness.clock.pass_s(60)
    harness.tick()
    assert harness.executor.launches == 1


def test_a_repeated_evaluation_waits_for_the_bucket(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.plan(every=0)
    harness.checkpoint(5, weights=False)
    evaluations.evaluate(harness.run, "val", actor=harness.run.owner)
    harness.tick()
    assert harness.states() == {5: "skipped"}
    harness.clock.pass_s(advance.GIVE_UP.total_seconds() + 1)

    def away(row: Evaluation, store: Store) -> None:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(advance, "read_result", away)
    evaluations.evaluate(harness.run, "val", actor=harness.run.owner)
    harness.tick()
    assert harness.states() == {5: "queued"}


def test_a_job_goes_on_while_its_account_needs_an_operator(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    poll = harness.executor.poll

    def denied(handles: Any) -> Any:
        raise AccountError("the token has expired")

    monkeypatch.setattr(harness.executor, "poll", denied)
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.message) == ("running", "the token has expired")
    assert row.attempts.get().ended_at is None
    monkeypatch.setattr(harness.executor, "poll", poll)
    harness.write(5, 2.0)
    harness.end()
    harness.clock.pass_s(60)
    harness.tick()
    assert harness.states() == {5: "succeeded"}


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_account_that_stays_away_does_not_hold_the_others(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    if cancelled:
        evaluations.cancel(harness.run, "val", 5, actor=harness.run.owner)

    def denied(handles: Any) -> Any:
        raise AccountError("the token has expired")

    monkeypatch.setattr(harness.executor, "poll", denied)
    harness.clock.pass_s(advance.GIVE_UP.total_seconds() + 60)
    harness.tick()
    assert harness.states() == {5: "cancelling" if cancelled else "running"}
    harness.clock.pass_s(3600)
    harness.tick()
    assert harness.states() == {5: "failed"}


def test_a_refused_launch_fails_with_the_reason(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.executor.refuses = LaunchRefused("no such machine")
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.message) == ("failed", "no such machine")
    assert row.attempts.get().ended_at is not None


def test_the_reaper_spares_jobs_of_evaluations(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    handles = harness.executor.live()
    assert orphans(handles, duplicates=True) == []
    EvaluationAttempt.objects.update(ended_at=timezone.now())
    assert [job.why for job in orphans(handles, duplicates=True)] == ["its attempt has ended"]


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
    from runs.queries.budgets import spending_since
    from runs.queries.live_jobs import JobFilter
    from runs.queries.spend import Period, spend

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


def test_deletion_of_a_run_waits_for_the_jobs(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    Run.objects.filter(pk=harness.run.pk).update(
        state=RunState.SUCCEEDED, delete_requested_at=timezone.now()
    )
    with pytest.raises(LaunchLater, match="evaluations of the run are being cancelled"):
        deletion.delete_run(str(harness.run.pk))
    harness.tick()
    harness.end(Cause.CANCELLED)
    harness.tick()
    deletion.delete_run(str(harness.run.pk))
    assert not Run.objects.filter(pk=harness.run.pk).exists()


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


def test_requests_that_cannot_be_carried_out(harness: Evaluations) -> None:
    actor = harness.run.owner
    with pytest.raises(ActionRefused, match=r"expected an evaluation of the run \(none yet\)"):
        evaluations.evaluate(harness.run, "val", actor=actor)
    harness.plan(every=0)
    with pytest.raises(ActionRefused, match="expected a checkpoint, found none yet"):
        evaluations.evaluate(harness.run, "val", actor=actor)
    harness.checkpoint(5)
    with pytest.raises(ActionRefused, match="expected a round with a checkpoint, found 4"):
        evaluations.evaluate(harness.run, "val", actor=actor, round=4)
    harness.tick()
    assert harness.states() == {}
    assert evaluations.evaluate(harness.run, "val", actor=actor)
    assert not evaluations.evaluate(harness.run, "val", actor=actor)
    assert not evaluations.cancel(harness.run, "val", 4, actor=actor)
    assert harness.executor.jobs == {}
