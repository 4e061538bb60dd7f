"""Objects that one sweep misses are deleted by a later one."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.protocol import keys
from diloco.store.base import LocalStore, Store
from diloco.training.sweep import sweep

LATE = "rounds/00000002/contributions/00007.00001-0000abcd.bin"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = LocalStore(tmp_path)
    made.put(keys.checkpoint_manifest(0), b"{}")  # of the initial weights
    return made


def commit(store: Store, round: int) -> None:
    """Write a round's payload and the checkpoint after it; then sweep."""
    store.put(f"rounds/{round:08d}/contributions/00000.00001-00000000.bin", b"payload")
    store.put(keys.checkpoint_manifest(round), b"{}")


def rounds_with_payloads(store: Store) -> list[int]:
    return [int(i.key.split("/")[1]) for i in store.list("rounds/") if i.key.endswith(".bin")]


def test_a_missed_sweep_is_completed_by_the_next(store: Store) -> None:
    for round in range(1, 9):
        commit(store, round)
        if round != 5:  # the process died between the manifest and its sweep
            sweep(store)
    assert rounds_with_payloads(store) == [8]


def test_a_payload_uploaded_after_its_sweep_is_deleted(store: Store) -> None:
    for round in range(1, 9):
        commit(store, round)
        sweep(store)
        if round == 4:
            store.put(LATE, b"late")
    assert rounds_with_payloads(store) == [8]


def test_rounds_whose_residual_can_still_be_read_are_kept(store: Store) -> None:
    for round in range(1, 9):
        commit(store, round)
        sweep(store, rounds_kept=2)
    assert rounds_with_payloads(store) == [6, 7, 8]
    sweep(store, rounds_kept=2, at_the_end=True)
    assert rounds_with_payloads(store) == [6, 7, 8]
