"""Race conditions and unusual errors of the control plane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.store.base import LocalStore
from executors.base import AccountError, Cause, JobState, ReplicaHandle, ReplicaStatus
from runs.actions import replicas_and_pools
from runs.backends import circuit_breaker, executors
from runs.exceptions import LaunchLater
from runs.models import Run
from runs.reconcile import group_publishing, launch, orphan_reaper
from runs.submit.run_draft import PoolDraft
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db
MakeHarness = Callable[..., Any]


def pool(harness: Any) -> Any:
    return harness.run.pools.get()


def test_invalid_options_require_intervention(settings: Any) -> None:
    """An unhandled exception would end the tick of every run with such a pool, and the reaper's
    check of all other accounts."""
    settings.BACKEND_OPTIONS = {"huggingface": {"no-such-option": 1}}
    with pytest.raises(
        AccountError, match=r"huggingface cannot be used as it is set up: .*no-such"
    ):
        executors.executor_of("huggingface", None)


def test_a_backend_without_its_client_requires_intervention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*args: Any) -> Any:
        raise ImportError("No module named 'modal'")

    monkeypatch.setattr(executors, "_executor", missing)
    with pytest.raises(AccountError, match="No module named 'modal'"):
        executors.executor_of("modal", None)


@pytest.fixture
def priced(make_harness: MakeHarness) -> Any:
    made = make_harness(replicas=2, pools=(PoolDraft(count=2, price_usd_h=36.0),), budget_usd=50.0)
    for number in (0, 1):
        made.executor.jobs[made.key(number)] = ReplicaStatus(state=JobState.PENDING)
    return made


def test_waiting_for_a_machine_costs_nothing_while_the_backend_is_unreachable(priced: Any) -> None:
    priced.tick(2 * 3600)
    priced.executor.away = "503"
    run = priced.tick(1)
    assert (run.cost_usd, run.state) == (0.0, "provisioning")


def test_a_cost_decreases_when_the_backend_reports_a_later_start(priced: Any) -> None:
    key = priced.key(0)
    priced.executor.jobs[key] = ReplicaStatus(state=JobState.RUNNING)
    assert priced.tick(3600).cost_usd == pytest.approx(36.0)
    began = priced.clock().timestamp()
    priced.executor.jobs[key] = ReplicaStatus(state=JobState.RUNNING, started_wall_s=began)
    assert priced.tick(100).cost_usd == pytest.approx(1.0)


def test_one_account_with_two_credentials_is_checked_once(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(replicas=1)
    harness.executor.jobs["0123456789ab-0-1"] = ReplicaStatus(state=JobState.RUNNING)
    seen: set[str] = set()

    def seen_before(backend: str, handle: ReplicaHandle) -> bool:
        known = handle.to_json() in seen
        seen.add(handle.to_json())
        return known

    monkeypatch.setattr(orphan_reaper, "_seen_before", seen_before)
    monkeypatch.setattr(orphan_reaper, "executor_of", lambda backend, credential: harness.executor)
    monkeypatch.setattr(orphan_reaper, "accounts", lambda now: [("local", None), ("local", None)])
    assert [orphan_reaper.reap(), orphan_reaper.reap()] == [0, 1]
    assert harness.executor.cancelled == ["0123456789ab-0-1"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_stopped_while_it_is_being_published_stays_stopped(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    run = make_run()
    real = group_publishing.copy_fork_checkpoint

    def meanwhile(*args: Any, **kwargs: Any) -> None:
        replicas_and_pools.request_stop(Run.objects.get(pk=run.pk), actor=run.owner)
        real(*args, **kwargs)

    monkeypatch.setattr(group_publishing, "copy_fork_checkpoint", meanwhile)
    if fails:
        result = [b"another's", None]
        monkeypatch.setattr(group_publishing, "_existing_group", lambda store: result.pop())
        create = LocalStore.create

        def lost(store: LocalStore, key: str, data: bytes) -> bool:
            return key != keys.GROUP and create(store, key, data)

        monkeypatch.setattr(LocalStore, "create", lost)
    launch.launch_run(str(run.pk))
    run.refresh_from_db()
    assert run.state == "stopping"


def test_a_training_run_waits_for_an_unavailable_backend(make_harness: MakeHarness) -> None:
    harness = make_harness(replicas=2)
    harness.start()
    harness.executor.end(harness.key(1), Cause.PREEMPTED)
    harness.beat_all(but=(1,))
    harness.tick()
    harness.executor.away = "no capacity"
    harness.clock.pass_s(10)
    for seconds in (1, 601):
        harness.clock.pass_s(seconds)
        try:
            launch.launch_replica(harness.replica(1).pk)
        except LaunchLater:
            continue
    assert harness.replica(1).state == "restarting"
    assert "no capacity" in harness.replica(1).state_reason
    harness.executor.away = ""
    harness.beat_all(but=(1,))
    harness.tick(circuit_breaker.OPEN_CAP_S)
    harness.work()
    assert harness.replica(1).state == "provisioning"


def test_a_draining_replica_returns_when_its_pool_grows(make_harness: MakeHarness) -> None:
    harness = make_harness(replicas=2, max_replicas=2)
    harness.start()
    for count in (1, 2):
        replicas_and_pools.scale_pool(pool(harness), count, actor=harness.run.owner)
    assert harness.replica(1).state == "restarting"
    harness.beat_all()
    harness.tick()
    harness.executor.end(harness.key(1), Cause.DONE, code=0)
    harness.beat_all(but=(1,))
    harness.tick()
    harness.work()
    assert harness.run.replicas.count() == 2
    assert harness.replica(1).attempts.count() == 2


def test_simultaneous_failures_open_the_breaker_of_the_pool_once(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(replicas=8)
    for number in range(8):
        harness.executor.end(harness.key(number), Cause.ERROR, code=1, message="image not found")
    harness.tick()
    assert pool(harness).failures == circuit_breaker.FAILURES
    assert (pool(harness).open_until - harness.clock()).total_seconds() == circuit_breaker.OPEN_S


def test_a_retry_time_of_the_backend_is_not_shortened(
    make_harness: MakeHarness, clock: w.Clock
) -> None:
    harness = make_harness(replicas=2)
    circuit_breaker.count_failure(pool(harness), "429", after_s=300)
    for _ in range(3):
        circuit_breaker.count_failure(pool(harness), "429", after_s=1)
    assert (pool(harness).open_until - clock()).total_seconds() == 300
