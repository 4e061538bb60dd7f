"""Trying again: how long, how often, and what is not worth it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from diloco.rendezvous.store import Data, LocalStore, MakeParts, StoreUnavailable
from diloco.retry import LONGEST_PAUSE_S, RetryingStore


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def wall(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds


class Down(LocalStore):
    """Answers nothing for the next ``failures`` requests."""

    def __init__(self, root: Path, failures: int) -> None:
        super().__init__(root)
        self.failures = failures
        self.tries = 0

    def _try(self) -> None:
        self.tries += 1
        if self.tries <= self.failures:
            raise StoreUnavailable("503")

    def put(self, key: str, data: Data) -> None:
        self._try()
        super().put(key, data)

    def put_stream(self, key: str, make_parts: MakeParts) -> None:
        next(iter(make_parts()))
        self._try()
        super().put_stream(key, make_parts)


def retrying(store: LocalStore, *, seed: int = 0) -> tuple[RetryingStore, ManualClock]:
    clock = ManualClock()
    return RetryingStore(store, clock=clock, rng=random.Random(seed), deadline_s=60), clock


def test_pauses_grow_with_jitter_and_end_at_the_deadline(tmp_path: Path) -> None:
    firsts = set()
    for seed in range(5):
        store, clock = retrying(Down(tmp_path, 10**6), seed=seed)
        with pytest.raises(StoreUnavailable, match="503"):
            store.put("a", b"")
        assert clock.now_s == pytest.approx(60)
        assert clock.pauses[4] > clock.pauses[0]
        assert max(clock.pauses) <= 1.5 * LONGEST_PAUSE_S
        firsts.add(clock.pauses[0])
    assert len(firsts) == 5


def test_a_store_that_is_back_at_the_deadline_is_met_there(tmp_path: Path) -> None:
    away = Down(tmp_path, 10**6)
    store, clock = retrying(away)
    with pytest.raises(StoreUnavailable):
        store.put("a", b"1")
    back = Down(tmp_path, away.tries - 1)
    store, clock = retrying(back)
    store.put("a", b"1")
    assert clock.now_s == pytest.approx(60)


def test_each_try_of_a_stream_makes_the_parts_anew(tmp_path: Path) -> None:
    made = 0

    def parts() -> Iterator[bytes]:
        nonlocal made
        made += 1
        yield b"1"
        yield b"2"

    store, _ = retrying(Down(tmp_path, 3))
    store.put_stream("a", parts)
    assert store.get("a") == b"12"
    assert made == 4 + 1  # of each try, and of the one that was stored


def test_an_error_of_ones_own_parts_is_not_tried_again(tmp_path: Path) -> None:
    def parts() -> Iterable[bytes]:
        raise RuntimeError("bug")

    store, clock = retrying(LocalStore(tmp_path))
    with pytest.raises(RuntimeError, match="bug"):
        store.put_stream("a", parts)
    assert clock.pauses == []
