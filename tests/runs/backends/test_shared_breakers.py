"""A dead store or account does not block processes of other runs."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
from django.utils import timezone

from diloco.store.base import LocalStore, StoreUnavailable
from runs import live_stream, tasks
from runs.backends import parallel_calls, shared_breakers
from runs.exceptions import LaunchLater
from runs.ingest import ingest_pass, stores
from runs.models import Evaluation, EvaluationPlan, Run

PLACE = "store:s3:bucket:"


@pytest.fixture
def redis(valkey: str, settings: Any) -> Any:
    settings.REDIS_URL = valkey
    live_stream.client().flushall()
    return live_stream.client()


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("runs.backends.shared_breakers.time.time", lambda: now[0])
    return now


def test_failing_place_is_open_for_longer_each_time(redis: Any, seconds: list[float]) -> None:
    for expected_s in (5, 10, 20, 40, 60, 60):
        shared_breakers.failed(PLACE, "no answer within 10 s")
        seconds[0] += expected_s - 0.1
        with shared_breakers.slot(PLACE) as free:
            assert not free
        seconds[0] += 0.2
        with shared_breakers.slot(PLACE) as free, shared_breakers.slot(PLACE) as second:
            assert (free, second) == (True, False), "one tries"
    shared_breakers.answered(PLACE)
    with shared_breakers.slot(PLACE) as free:
        assert free


def test_calls_that_fail_together_count_as_one(redis: Any, seconds: list[float]) -> None:
    for _ in range(4):  # calls of several runs that began before the first failure
        shared_breakers.failed(PLACE, "no answer within 10 s")
    seconds[0] += shared_breakers.OPEN_S + 0.1
    assert not shared_breakers.is_open(PLACE)
    for _ in range(4):
        shared_breakers.failed(PLACE, "no answer within 10 s")
    assert shared_breakers.state_of(PLACE).failures == 2


def test_slow_place_leaves_processes_for_others(redis: Any, seconds: list[float]) -> None:
    with shared_breakers.slot(PLACE) as first, shared_breakers.slot(PLACE) as second:
        seconds[0] += shared_breakers.QUICK_S
        with shared_breakers.slot(PLACE) as third, shared_breakers.slot("store:s3:other:") as other:
            assert (first, second, third, other) == (True, True, False, True)
    with shared_breakers.slot(PLACE) as free:
        assert free


def test_process_waits_for_a_quick_place(
    redis: Any, seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        assert all(
            stack.enter_context(shared_breakers.slot(PLACE)) for _ in range(shared_breakers.SLOTS)
        )
        monkeypatch.setattr("runs.backends.shared_breakers.time.sleep", lambda s: stack.close())
        with shared_breakers.slot(PLACE) as free:
            assert free


def test_a_slot_lasts_as_long_as_its_use(redis: Any) -> None:
    key = shared_breakers._slot(PLACE, 0)
    with shared_breakers.slot(PLACE, longest_s=300.0):
        assert redis.pttl(key) > 1000 * shared_breakers.SLOT_S
    assert not redis.exists(key)
    with shared_breakers.slot(PLACE):
        redis.set(key, "another process")  # took it after it had expired
    assert redis.get(key) == b"another process"


def test_mirrors_that_hang_leave_workers_for_launches(
    redis: Any, seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass can be longer than other uses of a place."""
    begun: list[str] = []

    def hang(mirror_id: str) -> None:
        begun.append(mirror_id)
        assert redis.pttl(shared_breakers._slot("trackers", 0)) > 1000 * (tasks.MIRROR_S - 60)
        seconds[0] += shared_breakers.QUICK_S
        if len(begun) < 3:
            tasks.mirror_run(str(len(begun)))

    monkeypatch.setattr(tasks.mirror, "mirror", hang)
    tasks.mirror_run("0")
    assert begun == ["0", "1"]


@pytest.mark.parametrize("same", ["account", "bucket"])
def test_evaluations_that_hang_leave_workers_for_launches(
    redis: Any, seconds: list[float], make_run: Any, monkeypatch: pytest.MonkeyPatch, same: str
) -> None:
    now = timezone.now()
    rows: list[Evaluation] = []
    for number in range(4):
        is_other = number == 3
        run = make_run()
        bucket = f"s3://{number if is_other or same == 'account' else 'one'}/{run.pk}"
        Run.objects.filter(pk=run.pk).update(rendezvous=bucket)
        backend = "local" if is_other else "modal" if same == "account" else f"b{number}"
        plan = EvaluationPlan.objects.create(
            run=run, name="val", spec={}, backend=backend, created_at=now
        )
        rows.append(plan.evaluations.create(run=run, round=1, created_at=now, next_at=now))
    begun: list[int] = []

    def hang(evaluation_id: int) -> None:
        begun.append(evaluation_id)
        seconds[0] += shared_breakers.QUICK_S
        for row in rows:
            if row.pk > max(begun):
                tasks.advance_evaluation(row.pk)

    monkeypatch.setattr(tasks.advance, "advance", hang)
    tasks.advance_evaluation(rows[0].pk)
    assert begun == [rows[0].pk, rows[1].pk, rows[3].pk]


def test_clock_set_back_does_not_keep_a_place_open(redis: Any, seconds: list[float]) -> None:
    shared_breakers.failed(PLACE, "no answer")
    seconds[0] -= 3600
    assert not shared_breakers.is_open(PLACE)


def test_without_redis_every_breaker_is_closed(settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    shared_breakers.failed(PLACE, "no answer")
    with shared_breakers.slot(PLACE) as free:
        assert free


def test_runs_of_one_bucket_and_credential_are_one_place(make_run: Any) -> None:
    one, other = make_run(), make_run()
    assert shared_breakers.store_place(one) == shared_breakers.store_place(other)
    one.rendezvous, other.rendezvous = "s3://bucket/a", "s3://bucket/b"
    assert shared_breakers.store_place(one) == shared_breakers.store_place(other) == PLACE
    other.rendezvous = "s3://another/a"
    assert shared_breakers.store_place(one) != shared_breakers.store_place(other)


def test_failed_ingest_opens_the_breaker_for_other_runs(
    redis: Any, seconds: list[float], make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness()
    passes: list[str] = []
    monkeypatch.setattr(shared_breakers, "store_place", lambda run: PLACE)
    real = ingest_pass.ingest_run

    def count(run_id: str) -> bool:
        passes.append(run_id)
        return real(run_id)

    monkeypatch.setattr(ingest_pass, "ingest_run", count)

    def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("no answer within 10 s")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "list", away)
        for _ in range(3):
            tasks.ingest_run(str(harness.run.pk))
    assert len(passes) == 1
    harness.run.refresh_from_db()
    assert harness.run.ingest.trouble == "away"
    with pytest.raises(LaunchLater, match="no answer"):
        tasks._wait_for_store(str(harness.run.pk))


# Stores.


def test_hanging_request_times_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    never = threading.Event()
    monkeypatch.setattr(LocalStore, "get", lambda self, key, **_: never.wait() or b"")
    store = stores.BoundedStore(LocalStore(tmp_path), patience_s=0.05)
    with pytest.raises(StoreUnavailable, match=r"a: no answer within 0\.05 s"):
        store.get("a")
    patient = stores.BoundedStore(LocalStore(tmp_path), patience_s=60)
    patient.put("b", b"x")
    assert patient.get_range("b", 0, 1) == b"x"
    never.set()


def test_dead_store_blocks_a_limited_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(parallel_calls, "PER_PLACE", 2)
    for _ in range(2):
        with pytest.raises(parallel_calls.CallTimeout, match="within"):
            parallel_calls.call(never.wait, place="dead", patience_s=0.01)
    with pytest.raises(parallel_calls.CallTimeout, match="2 requests to dead are unanswered"):
        parallel_calls.call(never.wait, place="dead", patience_s=60)
    assert parallel_calls.call(lambda: 1, place="alive", patience_s=60) == 1
    never.set()


def test_exception_of_a_request_is_raised(tmp_path: Any) -> None:
    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    with pytest.raises(Killed):
        parallel_calls.call(die, place="a", patience_s=60)
