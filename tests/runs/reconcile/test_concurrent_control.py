"""What a second reading of the control plane found, each as it would have happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.store.base import LocalStore
from executors.base import Cause, JobState, NeedsPerson, ReplicaHandle, ReplicaStatus
from runs.actions import replicas_and_pools
from runs.backends import circuit_breaker, executors
from runs.exceptions import LaunchLater
from runs.models import Run
from runs.reconcile import launch, orphan_reaper
from runs.submit.run_draft import PoolDraft
from tests.runs import world as w

pytestmark = pytest.mark.django_db
MakeWorld = Callable[..., Any]


def pool(world: Any) -> Any:
    return world.run.pools.get()


def test_options_that_make_no_executor_need_a_person(settings: Any) -> None:
    """Raised as they came they would end the tick of every run with such a pool, and the reaper's
    look at all other accounts."""
    settings.BACKEND_OPTIONS = {"huggingface": {"no-such-option": 1}}
    with pytest.raises(NeedsPerson, match=r"huggingface cannot be used as it is set up: .*no-such"):
        executors.executor_of("huggingface", None)


def test_a_backend_without_its_client_needs_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any) -> Any:
        raise ImportError("No module named 'modal'")

    monkeypatch.setattr(executors, "_executor", missing)
    with pytest.raises(NeedsPerson, match="No module named 'modal'"):
        executors.executor_of("modal", None)


@pytest.fixture
def priced(make_world: MakeWorld) -> Any:
    made = make_world(replicas=2, pools=(PoolDraft(count=2, price_usd_h=36.0),), budget_usd=50.0)
    for number in (0, 1):
        made.executor.jobs[made.key(number)] = ReplicaStatus(state=JobState.PENDING)
    return made


def test_waiting_for_a_machine_costs_nothing_while_nobody_can_be_asked(priced: Any) -> None:
    priced.tick(2 * 3600)
    priced.executor.away = "503"
    run = priced.tick(1)
    assert (run.cost_usd, run.state) == (0.0, "provisioning")


def test_a_cost_goes_down_when_the_backend_says_that_it_began_later(priced: Any) -> None:
    key = priced.key(0)
    priced.executor.jobs[key] = ReplicaStatus(state=JobState.RUNNING)
    assert priced.tick(3600).cost_usd == pytest.approx(36.0)
    began = priced.clock().timestamp()
    priced.executor.jobs[key] = ReplicaStatus(state=JobState.RUNNING, started_wall_s=began)
    assert priced.tick(100).cost_usd == pytest.approx(1.0)


def test_one_account_with_two_credentials_is_one_sight(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(replicas=1)
    world.executor.jobs["0123456789ab-0-1"] = ReplicaStatus(state=JobState.RUNNING)
    seen: set[str] = set()

    def seen_before(backend: str, handle: ReplicaHandle) -> bool:
        known = handle.to_json() in seen
        seen.add(handle.to_json())
        return known

    monkeypatch.setattr(orphan_reaper, "_seen_before", seen_before)
    monkeypatch.setattr(orphan_reaper, "executor_of", lambda backend, credential: world.executor)
    monkeypatch.setattr(orphan_reaper, "accounts", lambda now: [("local", None), ("local", None)])
    assert [orphan_reaper.reap(), orphan_reaper.reap()] == [0, 1]
    assert world.executor.cancelled == ["0123456789ab-0-1"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_stopped_while_it_is_being_published_stays_stopped(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    run = make_run()
    real = launch.plant_fork

    def meanwhile(*args: Any, **kwargs: Any) -> None:
        replicas_and_pools.request_stop(Run.objects.get(pk=run.pk), actor=run.owner)
        real(*args, **kwargs)

    monkeypatch.setattr(launch, "plant_fork", meanwhile)
    if fails:
        found = [b"another's", None]
        monkeypatch.setattr(launch, "_existing_group", lambda store: found.pop())
        create = LocalStore.create

        def lost(store: LocalStore, key: str, data: bytes) -> bool:
            return key != keys.GROUP and create(store, key, data)

        monkeypatch.setattr(LocalStore, "create", lost)
    launch.launch_run(str(run.pk))
    run.refresh_from_db()
    assert run.state == "stopping"


def test_a_run_that_works_waits_for_a_backend_that_is_away_for_long(make_world: MakeWorld) -> None:
    world = make_world(replicas=2)
    world.start()
    world.executor.end(world.key(1), Cause.PREEMPTED)
    world.beat_all(but=(1,))
    world.tick()
    world.executor.away = "no capacity"
    world.clock.pass_s(10)
    for seconds in (1, 601):
        world.clock.pass_s(seconds)
        try:
            launch.launch_replica(world.replica(1).pk)
        except LaunchLater:
            continue
    assert world.replica(1).state == "restarting"
    assert "no capacity" in world.replica(1).state_reason
    world.executor.away = ""
    world.beat_all(but=(1,))
    world.tick(circuit_breaker.CLOSED_CAP_S)
    world.work()
    assert world.replica(1).state == "provisioning"


def test_a_replica_that_is_leaving_is_taken_back_when_its_pool_grows(make_world: MakeWorld) -> None:
    world = make_world(replicas=2, max_replicas=2)
    world.start()
    for count in (1, 2):
        replicas_and_pools.scale_pool(pool(world), count, actor=world.run.owner)
    assert world.replica(1).state == "restarting"
    world.beat_all()
    world.tick()
    world.executor.end(world.key(1), Cause.DONE, code=0)
    world.beat_all(but=(1,))
    world.tick()
    world.work()
    assert world.run.replicas.count() == 2
    assert world.replica(1).attempts.count() == 2


def test_what_was_launched_together_and_fails_together_closes_the_pool_once(
    make_world: MakeWorld,
) -> None:
    world = make_world(replicas=8)
    for number in range(8):
        world.executor.end(world.key(number), Cause.ERROR, code=1, said="image not found")
    world.tick()
    assert pool(world).failures == circuit_breaker.FAILURES
    assert (pool(world).closed_until - world.clock()).total_seconds() == circuit_breaker.CLOSED_S


def test_what_a_backend_asked_for_is_not_shortened(make_world: MakeWorld, clock: w.Clock) -> None:
    world = make_world(replicas=2)
    circuit_breaker.count_failure(pool(world), "429", after_s=300)
    for _ in range(3):
        circuit_breaker.count_failure(pool(world), "429", after_s=1)
    assert (pool(world).closed_until - clock()).total_seconds() == 300
