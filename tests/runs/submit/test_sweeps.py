"""Sweeps: created whole or not at all, limited in parallel and in dollars, and controlled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executors.base import Problem
from runs.actions import sweeps as actions
from runs.exceptions import InvalidRun
from runs.models import Event, Run, Sweep
from runs.queries.selectors import runs_to_reconcile
from runs.reconcile.launch import launch_run
from runs.reconcile.sweeps import control_sweep, sweeps_to_control
from runs.states import RunState
from runs.submit import create, preflight
from runs.submit.run_draft import PlanDraft, RunDraft, local_demo
from runs.submit.sweep_space import parameters_of
from runs.submit.sweeps import SweepDraft, create_sweep, differing_field, estimate_sweep
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator_user(settings: Any, tmp_path: Path) -> Any:
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri() + "/"
    return w.person("olga", "operator")


def sweep_of(draft: RunDraft | None = None, **limits: Any) -> SweepDraft:
    draft = draft or local_demo()
    return SweepDraft(
        draft=draft, parameters=parameters_of([("inner_lr", "1e-4, 3e-4, 1e-3")], draft), **limits
    )


def created(owner: Any, **limits: Any) -> Sweep:
    return create_sweep(sweep_of(**limits), owner=owner, submit_key="k")


def set_state(run: Run, state: RunState, **columns: Any) -> None:
    Run.objects.filter(pk=run.pk).update(state=state, **columns)


def launched(outbox: list[Any]) -> list[str]:
    return [args[0] for task, *args in outbox if task == "launch_run"]


def test_every_run_has_its_value_and_its_own_rendezvous(
    operator_user: Any, outbox: list[Any]
) -> None:
    sweep = created(operator_user)
    runs = list(sweep.runs.order_by("sweep_index"))
    assert [run.settings.inner_lr for run in runs] == [1e-4, 3e-4, 1e-3]
    assert [run.sweep_values for run in runs] == [
        {"settings.inner_lr": value} for value in (1e-4, 3e-4, 1e-3)
    ]
    assert len({run.rendezvous for run in runs}) == 3
    assert launched(outbox) == [str(run.pk) for run in runs]


def test_every_run_has_the_evaluations(operator_user: Any, outbox: list[Any]) -> None:
    draft = replace(local_demo(), evaluations=(PlanDraft(name="val", every=2),))
    sweep = create_sweep(sweep_of(draft), owner=operator_user, submit_key="k")
    plans = [list(run.evaluation_plans.values_list("name", "every")) for run in sweep.runs.all()]
    assert plans == [[("val", 2)]] * 3


def test_the_prefix_of_a_document_becomes_a_folder_of_the_runs(
    operator_user: Any, outbox: list[Any], tmp_path: Path
) -> None:
    prefix = (tmp_path / "rendezvous" / "mine").as_uri()
    draft = w.draft(rendezvous=prefix)
    sweep = create_sweep(sweep_of(draft), owner=operator_user, submit_key="k")
    assert sorted(sweep.runs.values_list("rendezvous", flat=True)) == [
        f"{prefix}/00{number}" for number in (1, 2, 3)
    ]


def test_one_key_makes_one_sweep(operator_user: Any, outbox: list[Any]) -> None:
    first = created(operator_user)
    assert created(operator_user) == first
    assert (Sweep.objects.count(), Run.objects.count(), len(launched(outbox))) == (1, 3, 3)
    with pytest.raises(InvalidRun, match="another user"):
        create_sweep(sweep_of(), owner=w.person("otto", "operator"), submit_key="k")


def test_a_sweep_that_differs_from_the_first_of_its_key(
    operator_user: Any, outbox: list[Any]
) -> None:
    row = created(operator_user)
    assert differing_field(row, sweep_of()) == ""
    draft = local_demo()
    other = parameters_of([("inner_lr", "1e-4, 3e-4")], draft)
    assert differing_field(row, replace(sweep_of(), parameters=other)) == "parameters"
    assert differing_field(row, sweep_of(budget_usd=5.0)) == "budget_usd"
    assert differing_field(row, sweep_of(parallel=1)) == "parallel"
    assert differing_field(row, sweep_of(replace(draft, max_restarts=9))) == "run.max_restarts"
    row.runs.filter(sweep_index=0).delete()
    assert differing_field(row, sweep_of()) == ""
    row.runs.all().delete()
    assert differing_field(row, sweep_of()) == ""


def test_nothing_is_stored_if_one_run_cannot_be(
    operator_user: Any, outbox: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = create.store_pool
    calls = []

    def fails_at_the_third(run: Run, *rest: Any, **more: Any) -> Any:
        calls.append(run)
        if len(calls) == 3:
            raise InvalidRun("pools", "a test")
        return stored(run, *rest, **more)

    monkeypatch.setattr(create, "store_pool", fails_at_the_third)
    with pytest.raises(InvalidRun, match="a test"):
        created(operator_user)
    assert (Sweep.objects.count(), Run.objects.count(), Event.objects.count()) == (0, 0, 0)


@pytest.fixture
def contacted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names and addresses that a check asks for, without calling them."""
    seen: list[str] = []
    refused = {"file:///refused.txt": ["a test"]}

    def pool(pool: Any, index: int, *_: Any) -> preflight.CheckResult:
        seen.append(f"pool {index}")
        return preflight.CheckResult()

    def bucket(uri: str, *_: Any, **__: Any) -> list[str]:
        seen.append(uri)
        return []

    def data(uri: str, *_: Any) -> list[str]:
        seen.append(uri)
        return refused.get(uri, [])

    monkeypatch.setattr(preflight, "_check_pool", pool)
    monkeypatch.setattr(preflight, "check_rendezvous", bucket)
    monkeypatch.setattr(preflight, "check_data", data)
    return seen


def checked(draft: RunDraft, owner: Any, *pairs: tuple[str, Any]) -> InvalidRun:
    sweep = SweepDraft(draft=draft, parameters=parameters_of(pairs, draft))
    with pytest.raises(InvalidRun) as error:
        create_sweep(sweep, owner=owner, submit_key="k", preflight=preflight.check_runs)
    assert not Sweep.objects.exists() and not Run.objects.exists()
    return error.value


def test_pools_bucket_and_each_of_the_data_are_checked_once(
    operator_user: Any, contacted: list[str], tmp_path: Path
) -> None:
    draft = w.draft(rendezvous=(tmp_path / "rendezvous" / "mine").as_uri())
    data = ["stdlib", "file:///one.txt", "file:///refused.txt"]
    error = checked(draft, operator_user, ("inner_lr", "1e-4, 1e-3"), ("workload.data", data))
    expected = ["pool 0", draft.rendezvous, *data]
    assert sorted(contacted) == sorted(expected)
    assert error.problems == (
        Problem(field="data", message="with inner_lr=0.0001, data=file:///refused.txt: a test"),
    )


def test_deadline_and_budget_of_every_run_are_checked(
    operator_user: Any, contacted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {("local", "cpu"): 1000.0}
    monkeypatch.setattr(preflight, "rates_of_all", lambda all_: [rates for _ in all_])
    demo = local_demo()
    pool = replace(demo.pools[0], price_usd_h=1.0, timeout_s=3600)
    draft = replace(demo, pools=(pool,), budget_usd=0.9, time_limit_s=0)
    pairs = ("sync_every", "2, 4000"), ("total_rounds", "100, 1000")
    error = checked(draft, operator_user, *pairs)
    assert [(each.field, each.message.partition(": ")[0]) for each in error.problems] == [
        ("budget_usd", "with sync_every=2, total_rounds=1000"),
        ("pools.0.timeout_s", "with sync_every=4000, total_rounds=100"),
    ]


def test_a_problem_of_all_runs_is_reported_once_and_without_values(
    operator_user: Any, contacted: list[str]
) -> None:
    draft = replace(local_demo(), store_credential=7)
    [problem] = checked(draft, operator_user, ("inner_lr", "1, 2")).problems
    assert problem.field == "store_credential"
    assert problem.message.startswith("expected a credential for store")
    assert contacted == []


def test_a_sweep_has_a_name_of_its_own(operator_user: Any) -> None:
    error = checked(replace(local_demo(), name=" "), operator_user, ("inner_lr", "1, 2"))
    assert (error.field, error.message) == ("name", "expected 1 to 80 characters, found 0")


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"metric": "nothing"}, "sweep_metric"),
        ({"parallel": 101}, "sweep_parallel"),
        ({"parallel": -1}, "sweep_parallel"),
        ({"budget_usd": float("nan")}, "sweep_budget_usd"),
        ({"budget_usd": -1.0}, "sweep_budget_usd"),
        ({"budget_usd": 1e13}, "sweep_budget_usd"),
    ],
)
def test_a_limit_out_of_range_names_its_field(
    operator_user: Any, limits: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRun) as error:
        created(operator_user, **limits)
    assert error.value.field == field


def test_the_estimate_is_of_all_runs_and_of_their_turns(operator_user: Any) -> None:
    sweep = sweep_of(parallel=2)
    estimate = estimate_sweep(sweep, sweep.drafts())
    assert estimate.runs == 3
    assert estimate.hours == pytest.approx(2 * 1800 / 3600)  # the time limit, in two turns
    assert estimate.usd == 0


def test_an_estimate_above_the_budget_needs_consent(operator_user: Any, outbox: list[Any]) -> None:
    demo = local_demo()
    priced = replace(demo, pools=(replace(demo.pools[0], price_usd_h=1.0),))
    sweep = sweep_of(priced, budget_usd=0.5)
    with pytest.raises(InvalidRun, match="the estimate of 3 runs") as error:
        create_sweep(sweep, owner=operator_user, submit_key="k")
    assert error.value.field == "sweep_budget_usd"
    create_sweep(sweep, owner=operator_user, submit_key="k", over_budget=True)
    assert Run.objects.count() == 3


def test_at_most_n_runs_work_at_a_time(operator_user: Any, outbox: list[Any]) -> None:
    sweep = created(operator_user, parallel=1)
    first, second, third = sweep.runs.order_by("sweep_index")
    assert launched(outbox) == [str(first.pk)]
    assert list(runs_to_reconcile()) == [first]
    launch_run(str(second.pk))  # a task that is delivered by mistake
    assert Run.objects.get(pk=second.pk).state == "queued"

    control_sweep(str(sweep.pk))
    assert launched(outbox) == [str(first.pk)]
    set_state(first, RunState.STOPPING)
    control_sweep(str(sweep.pk))
    assert launched(outbox) == [str(first.pk)]
    set_state(first, RunState.SUCCEEDED)
    control_sweep(str(sweep.pk))
    assert launched(outbox) == [str(first.pk), str(second.pk)]
    control_sweep(str(sweep.pk))
    assert launched(outbox) == [str(first.pk), str(second.pk)]
    set_state(second, RunState.PAUSED)
    control_sweep(str(sweep.pk))
    assert launched(outbox)[-1] == str(third.pk)
    assert list(sweeps_to_control()) == []
    third.refresh_from_db()
    assert (third.sweep_held, third.state_reason) == (False, "waiting for a worker")


def test_a_spent_budget_stops_the_runs_and_starts_no_other(
    operator_user: Any, outbox: list[Any]
) -> None:
    sweep = created(operator_user, parallel=1, budget_usd=1.0)
    first, second, third = sweep.runs.order_by("sweep_index")
    set_state(first, RunState.RUNNING, cost_usd=0.99)
    control_sweep(str(sweep.pk))
    first.refresh_from_db()
    assert first.state == "running"
    set_state(first, RunState.RUNNING, cost_usd=1.0)
    assert list(sweeps_to_control()) == [sweep]
    control_sweep(str(sweep.pk))
    for run in (first, second, third):
        run.refresh_from_db()
        assert run.state == "stopping"
        assert run.state_reason == "the budget of its sweep, $1.00, is spent"
    assert second in runs_to_reconcile()


def test_stop_ends_every_run_of_the_sweep(operator_user: Any, outbox: list[Any]) -> None:
    sweep = created(operator_user, parallel=1)
    done = sweep.runs.order_by("sweep_index")[0]
    set_state(done, RunState.SUCCEEDED)
    assert actions.stop(sweep, actor=operator_user) == 2
    assert actions.stop(sweep, actor=operator_user) == 0
    control_sweep(str(sweep.pk))
    assert sorted(sweep.runs.values_list("state", flat=True)) == [
        "stopping",
        "stopping",
        "succeeded",
    ]
