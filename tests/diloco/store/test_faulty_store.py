"""Each injected fault behaves as documented, and retries fix those that they can."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.store.base import LocalStore, MissingKey, StoreUnavailable
from diloco.store.retry import RetryingStore
from tests.diloco.clocks import ManualClock
from tests.diloco.faulty_store import LATE_OPERATIONS, Faults, FaultyStore

MakeFaulty = Callable[..., FaultyStore]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def faulty(tmp_path: Path, clock: ManualClock) -> MakeFaulty:
    def make(seed: int = 0, **chances: float) -> FaultyStore:
        inner = LocalStore(tmp_path)
        rng = random.Random(seed)
        return FaultyStore(inner, rng=rng, clock=clock, faults=Faults(**chances))

    return make


def test_without_faults_operations_pass_through(faulty: MakeFaulty) -> None:
    store = faulty()
    store.put("a", b"1")
    store.put_stream("b", lambda: [b"2", b"3"])
    assert (store.create("c", b"4"), store.create("c", b"5")) == (True, False)
    assert (store.get("a"), store.get_range("b", 1, 9), store.get("c")) == (b"1", b"3", b"4")
    assert [info.key for info in store.list("")] == ["a", "b", "c"]
    store.delete(["a"])
    with pytest.raises(MissingKey):
        store.get("a")
    assert not any(store.injected.values())


def test_a_dropped_request_does_nothing(faulty: MakeFaulty) -> None:
    store = faulty(drop=1)
    for write in (store.put, store.create):
        with pytest.raises(StoreUnavailable, match="dropped"):
            write("a", b"1")
    with pytest.raises(StoreUnavailable, match="dropped"):
        store.list("")
    assert store.inner.list("") == []
    assert store.injected["drop"] == 3


def test_a_lost_response_hides_a_completed_operation(faulty: MakeFaulty) -> None:
    store = faulty(lose=1)
    with pytest.raises(StoreUnavailable, match="response"):
        store.create("a", b"1")
    assert store.inner.get("a") == b"1"
    with pytest.raises(StoreUnavailable, match="response"):
        store.delete(["a"])
    assert store.inner.list("") == []


def test_a_delay_advances_the_clock(faulty: MakeFaulty, clock: ManualClock) -> None:
    store = faulty(delay=1, delay_s=9)
    store.put("a", b"1")
    assert 0 < clock.now_s <= 9


def test_a_duplicated_request_returns_either_result(faulty: MakeFaulty) -> None:
    store = faulty(duplicate=1)
    answers = [store.create(f"new/{index}", b"mine") for index in range(30)]
    assert {*answers} == {True, False}
    assert {store.inner.get(info.key) for info in store.inner.list("new/")} == {b"mine"}


def test_a_torn_body_leaves_no_object_and_returns_no_data(faulty: MakeFaulty) -> None:
    store = faulty(tear=1)
    for count in (0, 1, 2, 5):
        with pytest.raises(StoreUnavailable, match="torn"):
            store.put_stream("a", lambda count=count: [b"x"] * count)
    assert store.inner.list("") == []
    store.inner.put("a", b"1")
    with pytest.raises(StoreUnavailable, match="torn"):
        store.get("a")


def test_a_late_write_replaces_a_newer_one(faulty: MakeFaulty) -> None:
    store = faulty(late=1)
    with pytest.raises(StoreUnavailable, match="no response"):
        store.put("a", b"old")
    with pytest.raises(MissingKey):
        store.inner.get("a")
    store.inner.put("a", b"new")
    for _ in range(LATE_OPERATIONS):
        store.list("")
    assert store.inner.get("a") == b"old"


def test_settle_runs_late_writes(faulty: MakeFaulty) -> None:
    store = faulty(late=1)
    with pytest.raises(StoreUnavailable):
        store.create("a", b"1")
    with pytest.raises(StoreUnavailable):
        store.put_stream("b", lambda: iter([b"2", b"3"]))
    store.settle()
    assert (store.inner.get("a"), store.inner.get("b")) == (b"1", b"23")


def test_a_truncated_read_raises_no_error(faulty: MakeFaulty) -> None:
    store = faulty(truncate=1)
    store.put("a", bytes(100))
    assert len(store.get("a")) < 100
    assert len(store.get_range("a", 10, 50)) < 50


def test_faults_are_a_function_of_the_seed(tmp_path: Path, clock: ManualClock) -> None:
    def history(seed: int, folder: Path) -> list[str]:
        faults = Faults(drop=0.2, lose=0.2, duplicate=0.2, late=0.2, tear=0.2)
        inner = LocalStore(folder)
        store = FaultyStore(inner, rng=random.Random(seed), clock=clock, faults=faults)
        outcomes = []
        for index in range(40):
            try:
                outcomes.append(str(store.create(f"{index % 8}", b"x")))
            except StoreUnavailable as error:
                outcomes.append(str(error))
        return outcomes

    assert history(1, tmp_path / "a") == history(1, tmp_path / "b")
    assert history(1, tmp_path / "c") != history(2, tmp_path / "d")


RETRYABLE_FAULTS = {
    "drop": 0.15,
    "lose": 0.15,
    "delay": 0.1,
    "duplicate": 0.15,
    "tear": 0.15,
}


@pytest.mark.parametrize("seed", range(6))
def test_retries_fix_the_retryable_faults(
    faulty: MakeFaulty, clock: ManualClock, seed: int
) -> None:
    injected: Counter[str] = Counter()
    stores = []
    for writer in range(4):
        bad = faulty(1000 * seed + writer, **RETRYABLE_FAULTS)
        injected = bad.injected = injected  # one counter for all
        rng = random.Random(writer)
        stores.append(RetryingStore(bad, clock=clock, rng=rng, deadline_s=600))
    for round in range(10):
        won = [i for i, s in enumerate(stores) if s.create(f"once/{round}", f"by {i}".encode())]
        assert len(won) == 1
        assert stores[round % 4].get(f"once/{round}") == f"by {won[0]}".encode()
        stores[0].put("a", f"{round}".encode())
        stores[1].put_stream("b", lambda round=round: [b"x" * round, b"y"])
        assert stores[2].get("a") == f"{round}".encode()
        assert stores[3].get_range("b", 0, 99) == b"x" * round + b"y"
        assert len(stores[1].list("once/")) == round + 1
    assert set(RETRYABLE_FAULTS) <= {k for k, n in injected.items() if n}


def test_a_late_create_is_still_exclusive(faulty: MakeFaulty, clock: ManualClock) -> None:
    for seed in range(15):
        bad = [faulty(7 * seed + writer, late=0.5, lose=0.2) for writer in range(3)]
        stores = [
            RetryingStore(one, clock=clock, rng=random.Random(0), deadline_s=600) for one in bad
        ]
        won = [i for i, s in enumerate(stores) if s.create(f"{seed}", f"by {i}".encode())]
        for one in bad:
            one.settle()
        assert len(won) == 1
        assert bad[0].inner.get(f"{seed}") == f"by {won[0]}".encode()
