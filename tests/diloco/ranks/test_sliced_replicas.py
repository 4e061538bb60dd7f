"""Replicas of two and four ranks have the bits of a replica of one process.

Each scenario runs twice with the same data: replica 0 as one process, and as several ranks over
gloo, beside a replica 1 of one process. The processes run ``sliced_program.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.init import create_group
from diloco.protocol import keys
from diloco.protocol.pieces import read_range
from diloco.protocol.records import Commit, ContributionRecord, Plan
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore, MissingKey
from diloco.training.checkpoint import newest_manifest
from diloco.training.final_result import read_final
from tests import torch_process

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=1)]

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("sliced_program.py")
TWO_FRAGMENTS = {"num_fragments": 2, "total_rounds": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"codec": "bf16", "reduce_plan": "gather"},
    "fp32": {"codec": "fp32", "reduce_plan": "gather"},
    "int8-sharded": {"codec": "int8", "reduce_plan": "sharded"},
    "topk-overlap": {"codec": "topk", "error_feedback": 0.95, "overlap_steps": 1, **TWO_FRAGMENTS},
    "e3m0-low-bit": {"codec": "e3m0", "mean_codec": "int8", "reduce_plan": "sharded"},
    "rda": {"codec": "bf16", "merge": "rda", "reduce_plan": "gather"},
    "buffers": {
        "codec": "bf16",
        "reduce_plan": "gather",
        "master_dtype": "bf16",
        "momentum_dtype": "bf16",
    },
    "tensor-parallel": {"codec": "int8", "num_replicas": 1},
    "left": {
        "codec": "topk",
        "error_feedback": 0.95,
        "num_replicas": 1,
        "state_every": 1,
        **TWO_FRAGMENTS,
        "sync_every": 8,
    },
    "killed": {"codec": "bf16", "num_replicas": 1, "total_rounds": 3},
}
FOUR = ("bf16", "int8-sharded", "topk-overlap", "rda", "left", "tensor-parallel")
TWO = ("fp32", "e3m0-low-bit", "buffers", "resumed")
KILLED, EXIT = 3, 9
"""The rank that ends in the scenario ``killed``, and its exit code."""
ALONE = ("left", "tensor-parallel", "killed")
BESIDE_PEER = tuple(name for name in SETTINGS if name not in ALONE)


class Runs:
    """The runs with several ranks and with one process, below two folders."""

    def __init__(self, root: Path) -> None:
        self.sliced, self.whole = root / "sliced", root / "whole"

    def stores(self, name: str) -> tuple[LocalStore, LocalStore]:
        return LocalStore(self.sliced / "runs" / name), LocalStore(self.whole / "runs" / name)


def observed(root: Path, name: str, place: int | str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((root / f"{name}.{place}.json").read_text())
    return values


def play(root: Path, ranks: int, names: tuple[str, ...]) -> None:
    """Run scenarios with a replica 0 of so many ranks, and the peer beside it."""
    started = [(rank, ranks, names) for rank in range(ranks)]
    peers = tuple(name for name in names if name in BESIDE_PEER)
    started.append((0, 0, peers))
    processes = [
        torch_process.start(
            [PROGRAM, root, str(size), str(rank), *scenarios],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            output=root / f"{size}.{rank}.log",
        )
        for rank, size, scenarios in started
    ]
    exits = [0] * len(processes)
    if "killed" in names and ranks > KILLED:
        exits[KILLED] = EXIT
    assert torch_process.wait(processes, 900) == exits


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    root = tmp_path_factory.mktemp("sliced")
    played = Runs(root)
    for folder in (played.sliced, played.whole):
        for name, more in {**SETTINGS, "strided": {}}.items():
            settings: dict[str, Any] = {
                "sync_every": 2,
                "total_rounds": 2,
                "num_replicas": 2,
                "min_quorum": 2,
                "warmup_steps": 0,
                "eval_every": 1,
                "checkpoint_every": 1,
                "start_wait_s": 120.0,
                "round_timeout_s": 120.0,
                "heartbeat_timeout_s": 60.0,
                **more,
            }
            settings["min_quorum"] = settings["num_replicas"]
            create_group(str(folder / "runs" / name), GroupSettings(**settings))
    play(played.sliced, 4, (*FOUR, "strided", "killed"))
    play(played.sliced, 2, (*TWO, "restarted"))
    play(played.whole, 1, (*FOUR, *TWO, "killed"))
    yield played


def ranks_of(name: str) -> int:
    return 4 if name in FOUR else 2


def decided(store: LocalStore) -> tuple[list[Any], list[Any]]:
    """Return all that does not depend on the process that wrote it, round by round; apart from it
    the norms of the contributions, whose last bits depend on the CPU unless ``merge`` is rda."""
    rounds: list[Any] = []
    norms: list[Any] = []
    while True:
        try:
            plan = Plan.from_bytes(store.get(keys.plan(len(rounds) + 1)))
        except MissingKey:
            return rounds, norms
        commit = Commit.from_bytes(store.get(keys.commit(plan.round)))
        contributed = []
        for planned in plan.contributions:
            key = keys.contribution_record(plan.round, planned.replica, planned.incarnation)
            record = ContributionRecord.from_bytes(store.get(key))
            work = (record.tokens, record.steps, record.rounds, record.loss)
            contributed.append((planned.replica, planned.weight, work, record.base_digest))
            norms.append(record.norms)
        rounds.append((plan.mode, contributed, commit.merged_digest, commit.shards, commit.void))


@pytest.mark.parametrize("name", [*FOUR, *TWO])
def test_every_rank_ends_as_expected(runs: Runs, name: str) -> None:
    reason = "left" if name == "left" else "completed"
    places: list[int | str] = [*range(ranks_of(name))]
    if name in BESIDE_PEER:
        places.append("peer")
    for place in places:
        assert observed(runs.sliced, name, place).get("reason") == reason
    assert observed(runs.whole, name, 0).get("reason") == reason


@pytest.mark.parametrize("name", SETTINGS)
def test_contributions_and_means_have_the_bits_of_one_process(runs: Runs, name: str) -> None:
    (sliced, norms), (whole, expected) = map(decided, runs.stores(name))
    assert len(whole) == {"left": 4, "topk-overlap": 4, "killed": 3}.get(name, 2)
    assert sliced == whole
    exactly = SETTINGS[name].get("merge") == "rda"
    for found, norm in zip(norms, expected, strict=True):
        assert found == (norm if exactly else pytest.approx(norm, rel=1e-5))
    if name == "int8-sharded":
        assert {round[0] for round in whole} == {"sharded"}


@pytest.mark.parametrize("name", SETTINGS)
def test_checkpoints_and_results_have_the_bits_of_one_process(runs: Runs, name: str) -> None:
    digests = []
    for store in runs.stores(name):
        final, checkpoint = read_final(store), newest_manifest(store)
        assert final is not None and checkpoint is not None and checkpoint.outer is not None
        digests.append(
            (
                final.weights_digest,
                final.weights.sha256,
                checkpoint.round,
                checkpoint.weights_digest,
                *(
                    hashlib.sha256(read_range(store, stored, 0, stored.size_bytes)).hexdigest()
                    for stored in (checkpoint.weights, checkpoint.outer)
                ),
            )
        )
    assert digests[0] == digests[1]


@pytest.mark.parametrize("name", [*FOUR, *TWO[:-1]])
def test_ranks_hold_slices_of_the_state_and_upload_them(runs: Runs, name: str) -> None:
    held = [observed(runs.sliced, name, rank) for rank in range(ranks_of(name))]
    numel = held[0]["numel"]
    assert sum(rank["held"] for rank in held) == numel
    assert max(rank["held"] for rank in held) < 0.75 * numel
    store, _ = runs.stores(name)
    plan = Plan.from_bytes(store.get(keys.plan(1)))
    fragments = SETTINGS[name].get("num_fragments", 1)
    units = 3 if fragments == 2 else 5
    expected = min(units, ranks_of(name))
    slices = [planned.slices for planned in plan.contributions]
    assert slices == [expected, 1][: len(slices)]


def test_a_rank_that_ends_while_it_writes_a_checkpoint_ends_the_others(runs: Runs) -> None:
    for rank in range(KILLED):
        assert observed(runs.sliced, "killed", rank)["error"].startswith("ReplicaError: ")
    for rank in range(2):  # from checkpoint 0 of four ranks, because the other one is incomplete
        assert observed(runs.sliced, "restarted", rank)["reason"] == "completed"


def test_checkpoints_are_written_by_all_ranks(runs: Runs) -> None:
    store, whole = runs.stores("tensor-parallel")
    manifest = newest_manifest(store)
    assert manifest is not None and manifest.outer is not None
    assert manifest.weights.pieces and len(manifest.weights.pieces) == 4
    assert manifest.outer.pieces and len(manifest.outer.pieces) == 4
    alone = newest_manifest(whole)
    assert alone is not None and alone.weights.pieces is None


def test_strided_shards_are_refused_by_name(runs: Runs) -> None:
    for rank in range(4):
        error = observed(runs.sliced, "strided", rank)["error"]
        assert "expected parameters with the placements Shard and Replicate" in error
        assert "layers.0.weight" in error and "StridedShard" in error
