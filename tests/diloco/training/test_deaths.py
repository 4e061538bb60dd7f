"""I4 with fragments exchanged in the background: deaths at any step, slow peers, all dead."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from diloco.clock import SystemClock
from diloco.exchange.reduce import Reduction
from diloco.exchange.timings import Timings
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol import keys
from diloco.protocol.records import CheckpointManifest, Commit
from diloco.store.base import MissingKey
from diloco.training.checkpoint import load_checkpoint
from diloco.training.final_result import read_final
from tests.matrix import matrix

MakeGroup = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # the lease of a killed member
)

FRAGMENTED: dict[str, Any] = {"sync_every": 4, "num_fragments": 2, "overlap_steps": 1}
SEVERAL_OPEN: dict[str, Any] = {"sync_every": 4, "num_fragments": 2, "overlap_steps": 3}

TRAPS = [
    ("put", "rounds/00000002/contributions/*.bin", "before"),
    ("put", "rounds/00000002/contributions/*.bin", "after"),
    ("put", "rounds/00000002/contributions/*.json", "before"),
    ("put", "rounds/00000002/contributions/*.json", "after"),
    ("create", "rounds/00000002/plan.json", "before"),
    ("create", "rounds/00000002/plan.json", "after"),
    ("get", "rounds/00000002/contributions/*.bin", "before"),
    ("create", "rounds/00000002/commit.json", "before"),
    ("create", "rounds/00000002/commit.json", "after"),
    ("put", "checkpoints/00000002/*", "after"),
    ("create", "checkpoints/00000002/manifest.json", "before"),
    ("create", "checkpoints/00000002/manifest.json", "after"),
    ("put", "final/*", "after"),
]


@matrix("trap", TRAPS, fast=[TRAPS[1], TRAPS[7]], ids=lambda trap: "-".join(trap))
def test_a_replica_killed_during_overlap_does_not_stop_the_group(
    tiny_group: MakeGroup, trap: tuple[str, str, str]
) -> None:
    survive(tiny_group(heartbeat_timeout_s=40.0, **FRAGMENTED), trap)


@matrix("trap", [TRAPS[3], TRAPS[5], TRAPS[7]], fast=1, ids=lambda trap: "-".join(trap))
def test_a_replica_killed_with_several_open_rounds_does_not_stop_the_group(
    tiny_group: MakeGroup, trap: tuple[str, str, str]
) -> None:
    survive(tiny_group(heartbeat_timeout_s=40.0, **SEVERAL_OPEN), trap)


@pytest.mark.parametrize(
    "trap",
    [
        ("put", "rounds/00000002/reduced/*", "before"),
        ("put", "rounds/00000002/reduced/*", "after"),
        ("get", "rounds/00000001/reduced/*", "before"),
    ],
    ids=lambda trap: "-".join(trap),
)
@matrix("changes", [{}, SEVERAL_OPEN], fast=1, ids=["waiting", "overlapping"])
def test_a_killed_reducer_takes_no_residual_along(
    tiny_group: MakeGroup, trap: tuple[str, str, str], changes: dict[str, Any]
) -> None:
    """Every committed shard is what a process without state computes, residuals included."""
    group = tiny_group(
        heartbeat_timeout_s=40.0,
        codec="e3m0",
        mean_codec="e3m0",
        reduce_plan="sharded",
        checkpoint_every=100,
        **changes,
    )
    survivors = survive_deaths(group, trap)
    commits = group.commits()
    assert sum(reduced_again(group, commit) for commit in commits) >= 5
    weights = group.replayed()
    assert all(torch.equal(member.weights(), weights) for member in survivors)


@pytest.mark.parametrize("changes", [{}, SEVERAL_OPEN], ids=["one", "open"])
def test_a_residual_outlives_all_processes_and_the_sweeps(
    tiny_group: MakeGroup, changes: dict[str, Any]
) -> None:
    group = tiny_group(
        num_replicas=2,
        total_rounds=12,
        checkpoint_every=1,
        heartbeat_timeout_s=40.0,
        codec="int8",
        mean_codec="e3m0",
        reduce_plan="sharded",
        **changes,
    )
    trap = group.trap("put", "rounds/00000009/contributions/*.json", "after")
    for member in [group.start(replica, trap=trap) for replica in range(2)]:
        group.wait(member)
        assert member.store.dead
    both = threading.Barrier(2, timeout=600)

    def meet(member: Any, joined: Any) -> None:
        """Neither replica closes a round alone: each expects the other from the first one on."""
        if member.steps == 1:
            joined._lease.beat()
            both.wait()

    resumed = [group.start(replica, on_step=meet) for replica in range(2)]
    group.wait(*resumed)
    group.assert_agreed(*resumed)
    commits = group.commits()
    assert [bool(commit.void) for commit in commits] == [False] * 12
    assert not group.store.list(keys.reduced(1)), "the sweeps have deleted it"
    # A pause of the processes can make one contributor of two, whose round has no shards.
    assert sum(reduced_again(group, commit) for commit in commits[10:])


def reduced_again(group: Any, commit: Commit) -> int:
    """Check the shards of a round against those of a process without state; return their number."""
    table = Layout(nn.Linear(4, 2), fragments=group.settings.num_fragments).table
    reduction = Reduction(
        group.store,
        group.settings,
        group.plan(commit.round),
        table.slots_of(commit.fragment),
        timings=Timings(SystemClock()),
        commit_of={commit.round: commit for commit in group.commits()}.get,
    )
    for shard, digest in enumerate(commit.shards):
        assert reduction.store_shards([shard]) == {shard: digest}
    return len(commit.shards)


def survive_deaths(group: Any, trap: tuple[str, str, str]) -> list[Any]:
    """Run four rounds, in one of which replica 0 dies; return the survivors."""
    group.start(0, trap=group.trap(*trap))
    survivors = [group.start(replica) for replica in (1, 2)]
    group.wait()
    group.assert_agreed(*survivors)
    assert [bool(commit.void) for commit in group.commits()] == [False] * 4
    return survivors


def survive(group: Any, trap: tuple[str, str, str]) -> None:
    dying = group.start(0, trap=group.trap(*trap))
    survivors = [group.start(replica) for replica in (1, 2)]
    group.wait()
    group.assert_agreed(*survivors)
    commits = group.commits()
    assert [commit.round for commit in commits] == [1, 2, 3, 4]
    assert [commit.fragment for commit in commits] == [0, 1, 0, 1]
    assert not any(commit.void for commit in commits)
    assert commits[-1].last and read_final(group.store) is not None
    assert dying.store.dead or dying.error is None


@pytest.mark.parametrize("record", ["plan.json", "commit.json"])
@pytest.mark.parametrize("changes", [{}, FRAGMENTED], ids=["waiting", "overlapping"])
def test_a_slow_writer_reads_the_object_that_another_created(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, record: str, changes: dict[str, Any]
) -> None:
    """Delays replica 0's create of round 2 until another replica has created the object."""
    group = tiny_group(num_replicas=2, **changes)
    key = f"rounds/00000002/{record}"
    done = threading.Event()
    outcomes: list[bool] = []
    mortal = sys.modules[type(group).__module__].MortalStore
    create = mortal.create

    def slow(store: Any, wanted: str, data: Any) -> bool:
        if wanted == key and store._garbled == "slow":
            assert done.wait(600)
            outcomes.append(create(store, wanted, data))
            return outcomes[-1]
        created: bool = create(store, wanted, data)
        if wanted == key:
            done.set()
        return created

    monkeypatch.setattr(mortal, "create", slow)
    members = [group.start(0, garble="slow"), group.start(1)]
    group.wait()
    group.assert_agreed(*members)
    assert not any(outcomes), "there is one plan and one commit"
    assert [commit.round for commit in group.commits()] == [1, 2, 3, 4]
    assert all(len(commit.contributors) == 2 for commit in group.commits())


class Ahead:
    """Delays the reads of a joining replica until the group has committed more rounds."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._round = 0

    def at(self, round: int) -> None:
        with self._moved:
            self._round = round
            self._moved.notify_all()

    def by(self, rounds: int) -> None:
        with self._moved:
            target = self._round + rounds
            assert self._moved.wait_for(lambda: self._round >= target, 60)


def test_a_joining_replica_overtaken_by_sweeps_reloads_a_newer_checkpoint(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is deleted after its manifest was read, then the replayed rounds."""
    group = tiny_group(num_replicas=1, total_rounds=100_000, checkpoint_every=4, **FRAGMENTED)
    ahead, joined_in, missing = Ahead(), threading.Event(), list[str]()
    pauses = {"weights.safetensors": 13, "outer.safetensors": 2, ".bin": 13}
    mortal = sys.modules[type(group).__module__].MortalStore

    def overtaken(read: Callable[..., bytes]) -> Callable[..., bytes]:
        def reading(store: Any, key: str, *where: int, **how: Any) -> bytes:
            if store._garbled != "joiner":
                return read(store, key, *where, **how)
            if "weights.safetensors" not in pauses or key.endswith("weights.safetensors"):
                for ending in [ending for ending in pauses if key.endswith(ending)]:
                    ahead.by(pauses.pop(ending))
            try:
                return read(store, key, *where, **how)
            except MissingKey:
                missing.append(key)
                raise

        return reading

    monkeypatch.setattr(mortal, "get", overtaken(mortal.get))
    monkeypatch.setattr(mortal, "get_range", overtaken(mortal.get_range))

    def watch(member: Any, joined: Any) -> None:
        if member.replica == 1:
            joined_in.set()
        else:
            ahead.at(joined.round)
        if joined_in.is_set():
            joined.leave()

    first = group.start(0, on_step=watch)
    ahead.by(5)
    joiner = group.start(1, garble="joiner", on_step=watch)
    group.wait()
    assert (first.error, joiner.error) == (None, None) and joiner.reason == "left"
    assert not pauses, "its reads were delayed at each position"
    assert any(key.startswith("checkpoints/") for key in missing)
    assert any(key.endswith(".bin") for key in missing)


@pytest.mark.parametrize("changes", [{}, FRAGMENTED, SEVERAL_OPEN], ids=["one", "two", "open"])
def test_a_group_resumed_after_all_died_equals_the_replayed_log(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """I3 and I4: with nothing left but the store, the final bits follow from the log."""
    for module in (
        "training.post_round",
        "training.final_export",
    ):  # to replay it from the beginning
        monkeypatch.setattr(f"diloco.{module}.sweep", lambda store, **how: 0)
    group = tiny_group(
        num_replicas=2, total_rounds=8, checkpoint_every=3, heartbeat_timeout_s=40.0, **changes
    )
    trap = group.trap("put", "rounds/00000005/contributions/*.json", "after")
    for member in [group.start(replica, trap=trap) for replica in range(2)]:
        group.wait(member)
        assert member.store.dead
    assert 4 <= len(group.commits()) + 1 <= 6
    resumed = [group.start(replica) for replica in range(2)]
    group.wait(*resumed)
    group.assert_agreed(*resumed)
    commits = group.commits()
    assert [commit.round for commit in commits] == list(range(1, 9))

    settings = group.settings
    layout = Layout(nn.Linear(4, 2), fragments=settings.num_fragments)
    outer = OuterOptimizer(lr=0.7, momentum=0.9, numel=layout.numel)
    manifest = CheckpointManifest.from_bytes(group.store.get(keys.checkpoint_manifest(0)))
    weights = load_checkpoint(group.store, manifest, layout, outer).weights
    timings = Timings(SystemClock())
    for commit in commits:
        slots = layout.table.slots_of(commit.fragment)
        plan = group.plan(commit.round)
        merged = Reduction(group.store, settings, plan, slots, timings=timings).gather()
        outer.step(weights, merged.vector, layout.span(commit.fragment))
    layout.write(weights)
    assert torch.equal(resumed[0].weights(), _flat(layout))


def _flat(layout: Layout) -> torch.Tensor:
    """In model order, like the weights of a replica."""
    by_name = layout.split(layout.read())
    return torch.cat([by_name[tensor.name].flatten() for tensor in layout.tensors])
