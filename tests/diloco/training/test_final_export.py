"""The order in which replicas publish the final weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from diloco.protocol import keys
from diloco.protocol.records import Commit, Identity
from diloco.store.base import LocalStore
from diloco.training import final_export
from tests.diloco.bucket_harness import filled

MEMBERS = tuple(Identity(replica=n, incarnation=f"00001-{n:08x}") for n in range(3))


def commit(round: int) -> Commit:
    return filled(
        Commit, round=round, contributors=MEMBERS, committer=MEMBERS[0], committed_total=round
    )


def positions(store: LocalStore, applied: dict[int, int]) -> list[int]:
    """The position of each replica, by the round that it has applied."""
    results: dict[int, Any] = {
        n: SimpleNamespace(base=SimpleNamespace(round=round), last_commit=commit(round))
        for n, round in applied.items()
    }
    return [final_export._stagger_index(store, MEMBERS[n], result) for n, result in results.items()]


def test_replicas_take_turns_from_the_evaluator(tmp_path: Path) -> None:
    assert positions(LocalStore(tmp_path), {0: 1, 1: 1, 2: 1}) == [2, 0, 1]


def test_a_replica_without_the_newest_committed_round_comes_last(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for round in (1, 2):
        store.create(keys.commit(round), commit(round).to_bytes())
    first, second, late = positions(store, {0: 2, 1: 2, 2: 1})
    assert sorted((first, second)) == [1, 2]
    assert late == 3 + 1
