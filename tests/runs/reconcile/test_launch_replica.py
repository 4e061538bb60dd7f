"""Launching one replica: its key is stored first, and one key makes one job."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from diloco.store.base import StoreDenied
from diloco.store.retry import RUN_HAS_TRAINED
from executors.base import CodeRef
from runs.exceptions import LaunchLater
from runs.ingest.stores import store_for
from runs.models import ReplicaAttempt, Run
from runs.reconcile import jobs, launch
from runs.reconcile.launch import GIVE_UP_AFTER, launch_replica
from tests.runs import run_harness as w
from tests.runs.launching import Killed, MakeRun, launched, one_job_each

pytestmark = pytest.mark.django_db


def test_a_job_gets_the_rendezvous_the_code_and_its_number(
    make_run: MakeRun, executor: w.FakeExecutor
) -> None:
    run = launched(make_run())
    launch_replica(run.replicas.get(number=1).pk)
    [key] = executor.jobs
    assert executor.args[key] == (
        "diloco.replica",
        {"args": [run.rendezvous], "rank_env": "REPLICA_RANK"},
    )
    code = executor.code[key]
    assert code == CodeRef(uri=run.rendezvous, sha256=run.code_sha256)
    assert int(executor.env[key]["OMP_NUM_THREADS"]) >= 1
    spec = executor.specs[key]
    assert (spec.launch_key, spec.replica, spec.hardware) == (key, 1, "cpu")
    assert spec.labels == {"archipelago-run": run.pk.hex}


JOB_STEPS = ("_begin", "replica_env", "ensure", "_complete")


@pytest.mark.parametrize("step", JOB_STEPS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_job_s_launch_killed_at_any_step_makes_one_job(
    make_run: MakeRun,
    executor: w.FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    after: bool,
) -> None:
    run = launched(make_run())
    with monkeypatch.context() as patch:
        target: Any = executor if step == "ensure" else launch
        real = getattr(target, step)

        def dying(*args: Any, **kwargs: Any) -> Any:
            if after:
                real(*args, **kwargs)
            raise Killed

        patch.setattr(target, step, dying)
        for replica in run.replicas.all():
            with pytest.raises(Killed):
                launch_replica(replica.pk)
    for replica in run.replicas.all():
        launch_replica(replica.pk)
    one_job_each(run, executor)


def test_the_launch_key_is_stored_before_the_backend_is_called(
    make_run: MakeRun, executor: w.FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launched(make_run())
    seen: list[str] = []
    real = executor.ensure

    def watching(*args: Any, **kwargs: Any) -> Any:
        key = args[0][0].launch_key
        seen.append(ReplicaAttempt.objects.get(launch_key=key, handle__isnull=True).launch_key)
        return real(*args, **kwargs)

    monkeypatch.setattr(executor, "ensure", watching)
    launch_replica(run.replicas.get(number=0).pk)
    assert seen == list(executor.jobs)


def test_a_refusal_fails_the_replica_with_the_backend_s_message(
    make_run: MakeRun, executor: w.FakeExecutor
) -> None:
    run = launched(make_run())
    executor.refuses = "no such hardware: gpu9"
    replica = run.replicas.get(number=0)
    launch_replica(replica.pk)
    replica.refresh_from_db()
    assert replica.state == "failed"
    assert "no such hardware: gpu9" in replica.state_reason
    [attempt] = replica.attempts.all()
    assert (attempt.cause, attempt.handle) == ("refused", None)
    assert attempt.ended_at is not None


def test_a_missing_bundle_fails_the_replica(make_run: MakeRun, executor: w.FakeExecutor) -> None:
    run = launched(make_run())
    shutil.rmtree(store_for(run).root / "code")  # type: ignore[attr-defined]
    replica = run.replicas.get(number=0)
    launch_replica(replica.pk)
    replica.refresh_from_db()
    assert replica.state == "failed"
    assert "expected the code bundle at" in replica.state_reason
    assert executor.jobs == {}


def test_an_unavailable_backend_is_retried_and_then_given_up(
    make_run: MakeRun, executor: w.FakeExecutor, clock: w.Clock
) -> None:
    run = launched(make_run())
    replica = run.replicas.get(number=0)
    executor.away = "503 try later"
    with pytest.raises(LaunchLater, match="503"):
        launch_replica(replica.pk)
    replica.refresh_from_db()
    assert replica.state == "provisioning"
    assert "was not launched yet: 503 try later" in replica.state_reason
    clock.pass_s(GIVE_UP_AFTER.total_seconds() + 1)
    launch_replica(replica.pk)
    replica.refresh_from_db()
    assert replica.state == "failed"
    assert "503 try later" in replica.state_reason


def test_a_job_started_while_its_run_ended_is_cancelled(
    make_run: MakeRun, executor: w.FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launched(make_run())
    real = executor.ensure

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        Run.objects.filter(pk=run.pk).update(state="cancelled")
        return real(*args, **kwargs)

    monkeypatch.setattr(executor, "ensure", meanwhile)
    launch_replica(run.replicas.get(number=0).pk)
    assert executor.cancelled == list(executor.jobs)


@pytest.mark.parametrize("state", ["queued", "stopping", "succeeded", "failed"])
def test_nothing_is_launched_for_an_inactive_run(
    make_run: MakeRun, executor: w.FakeExecutor, state: str
) -> None:
    run = launched(make_run())
    Run.objects.filter(pk=run.pk).update(state=state)
    launch_replica(run.replicas.get(number=0).pk)
    assert executor.launches == 0
    assert not ReplicaAttempt.objects.exists()


def test_a_handle_is_plain_json_and_recorded_once(
    make_run: MakeRun, executor: w.FakeExecutor
) -> None:
    run = launched(make_run())
    replica = run.replicas.get(number=0)
    launch_replica(replica.pk)
    attempt = replica.attempts.get()
    [handle] = [executor.find(key) for key in executor.jobs]
    assert handle is not None
    assert attempt.handle == json.loads(handle.to_json())
    assert not jobs.save_handle(attempt, handle)
    assert run.events.filter(kind="job").count() == 1


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_denial_after_the_run_has_trained_is_an_outage(
    make_run: MakeRun,
    executor: w.FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
    has_trained: bool,
) -> None:
    run = launched(make_run())
    replica = run.replicas.get(number=0)
    if has_trained:
        Run.objects.filter(pk=run.pk).update(first_step_at=run.created_at, state="running")

    def denied(*_: Any, **__: Any) -> Any:
        raise StoreDenied("403 AccessDenied")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "ensure", denied)
        if has_trained:
            with pytest.raises(LaunchLater, match="403"):
                launch_replica(replica.pk)
        else:
            launch_replica(replica.pk)
    replica.refresh_from_db()
    assert replica.state == ("provisioning" if has_trained else "failed")
    if has_trained:
        launch_replica(replica.pk)
        [key] = executor.jobs
        assert executor.env[key][RUN_HAS_TRAINED] == "1"


def test_a_run_that_has_trained_is_resumed_once_its_bucket_permits_it(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    Run.objects.filter(pk=run.pk).update(first_step_at=run.created_at)

    def denied(*_: Any, **__: Any) -> Any:
        raise StoreDenied("403 AccessDenied")

    with monkeypatch.context() as patch:
        patch.setattr(launch, "publish_group", denied)
        with pytest.raises(LaunchLater, match="403"):
            launched(run)
        Run.objects.filter(pk=run.pk).update(first_step_at=None)
        assert launched(run).state == "failed"
