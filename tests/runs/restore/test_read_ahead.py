"""Rounds read ahead: in order, bounded, and as live ingest reads them where that fails."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.protocol import keys
from diloco.store.base import LocalStore, StoreDenied
from runs.backends import parallel_calls
from runs.ingest.stores import BoundedStore
from runs.restore import read_ahead
from runs.restore.read_ahead import AHEAD_IN_FOLDER, BLOCK, closed_rounds
from tests.runs.run_harness import Bucket

REPLICAS = frozenset({0, 1})
ROUNDS = 3 * BLOCK + 2


class Watchful(LocalStore):
    """A folder that records which threads read what; ``before`` is called before each read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before: Callable[[str], None] = lambda key: None
        self.reads: Counter[str] = Counter()
        self.threads: set[int] = set()

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self.reads[key] += 1
        self.threads.add(threading.get_ident())
        self.before(key)
        return super().get(key, limit=limit)


@pytest.fixture
def store(tmp_path: Path) -> Watchful:
    bucket = Bucket(LocalStore(tmp_path), wall_s=1.0)
    for round in range(1, ROUNDS + 1):
        for replica in REPLICAS:
            bucket.contribution(round, replica)
        bucket.plan(round, tuple(REPLICAS))
        bucket.commit(round, tuple(REPLICAS))
    bucket.contribution(ROUNDS + 1, 0)
    return Watchful(tmp_path)


def numbers(store: Watchful) -> list[int]:
    rounds = list(closed_rounds(BoundedStore(store), 1, REPLICAS, clock=lambda: 0.0))
    assert all(r.commit and r.plan and len(r.contributions) == 2 for r in rounds)
    return [r.number for r in rounds]


def test_rounds_are_read_once_and_in_order_up_to_the_open_one(store: Watchful) -> None:
    assert numbers(store) == list(range(1, ROUNDS + 1))
    assert {key for key, count in store.reads.items() if count > 1} == set()
    blocks = -(-ROUNDS // BLOCK) + AHEAD_IN_FOLDER  # one thread each
    assert len(store.threads) <= blocks


def test_a_round_that_is_unreadable_for_the_moment_raises_the_error_of_its_read(
    store: Watchful,
) -> None:
    def deny(key: str) -> None:
        if key == keys.plan(BLOCK + 2):
            raise StoreDenied("expected permission, found none")

    store.before = deny
    rounds = closed_rounds(BoundedStore(store), 1, REPLICAS, clock=lambda: 0.0)
    assert [r.number for r in itertools.islice(rounds, BLOCK + 1)] == list(range(1, BLOCK + 2))
    with pytest.raises(StoreDenied, match="expected permission"):
        next(rounds)
    assert store.reads[keys.plan(BLOCK + 2)] == 2  # ahead, and in its turn


def test_large_records_are_not_kept_but_read_in_their_turn(
    store: Watchful, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "BLOCK_BYTES", 0)
    assert numbers(store) == list(range(1, ROUNDS + 1))
    again = [key for key, count in store.reads.items() if count > 1]
    firsts = range(1, ROUNDS + 1, BLOCK)
    assert sorted(again) == [key(n) for key in (keys.round_pack, keys.commit) for n in firsts]


@pytest.mark.parametrize("hanging", [{1}, {1, 2, 3}], ids=["folder", "bucket"])
def test_requests_that_hang_do_not_hold_the_others(
    store: Watchful, hanging: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first commit of these blocks is read ahead, for ever."""
    if len(hanging) > 1:
        monkeypatch.setattr(read_ahead, "folder_store", lambda store: None)
        monkeypatch.setattr(read_ahead, "AHEAD", len(hanging) + 1)
        monkeypatch.setattr(parallel_calls, "PER_PLACE", len(hanging))
    waiting = {keys.commit(block * BLOCK + 1) for block in hanging}
    hung, ended = threading.Semaphore(0), threading.Event()
    now_s = 0.0

    def hang(key: str) -> None:
        if key in waiting:
            waiting.remove(key)
            hung.release()
            assert ended.wait(300)

    store.before = hang
    try:
        rounds = closed_rounds(BoundedStore(store), 1, REPLICAS, clock=lambda: now_s)
        assert next(rounds).number == 1
        for _ in hanging:
            assert hung.acquire(timeout=300)
        now_s = 3600.0
        assert [r.number for r in rounds] == list(range(2, ROUNDS + 1))
    finally:
        ended.set()


def test_blocks_are_not_read_after_the_import_has_failed(store: Watchful) -> None:
    rounds = closed_rounds(BoundedStore(store), 1, REPLICAS, clock=lambda: 0.0)
    next(rounds)
    blocks = rounds.gi_frame.f_locals["blocks"]
    rounds.close()
    assert all(block._watched.stopped for block in blocks)
