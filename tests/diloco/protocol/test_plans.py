"""Gather, sharded and syncer produce the same bits, and failures in between stop no other
replica."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from diloco.protocol import blocks, keys
from tests.matrix import matrix

MakeGroup = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # the lease of a killed member
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that a model of 28,002 parameters has seven blocks to share."""
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 4096)


class Wide(nn.Module):
    """28,002 parameters with an embedding, scaled down so that plain SGD does not diverge."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 3000)
        self.out = nn.Linear(3000, 2)
        self.table = nn.Embedding(700, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        looked_up = self.table(torch.arange(x.shape[0])).mean()
        return self.out(self.hidden(x)) * 0.01 + looked_up


def wide() -> nn.Module:
    """Equal weights in all members, because any of them can write checkpoint 0."""
    torch.manual_seed(7)
    return Wide()


def train(group: Any, replicas: int = 3, *, syncer: bool = False, **start: Any) -> list[Any]:
    if syncer:
        group.start_syncer()
        while not group.store.list(keys.member(group.settings.max_replicas)):
            pass
    members = [group.start(n, make_model=wide, **start) for n in range(replicas)]
    group.wait()
    return members


@matrix("merge", ["mean", "rda"], fast=1)
@matrix("codec", ["fp32", "bf16", "int8", "topk"], fast=("fp32", "int8"))
def test_all_plans_produce_the_same_bits(make_groups: MakeGroup, codec: str, merge: str) -> None:
    ends = {}
    for plan in ("gather", "sharded", "syncer"):
        group = make_groups(plan, reduce_plan=plan, codec=codec, merge=merge, total_rounds=3)
        members = train(group, syncer=plan == "syncer")
        group.assert_agreed(*members)
        assert [group.plan(r).mode for r in (1, 2, 3)] == [plan] * 3
        assert [len(c.contributors) for c in group.commits()] == [3, 3, 3]
        ends[plan] = members[0].weights()
    assert torch.equal(ends["gather"], ends["sharded"])
    assert torch.equal(ends["gather"], ends["syncer"])
    assert bool(torch.isfinite(ends["gather"]).all())


def test_a_late_joiner_replays_sharded_rounds_to_the_same_bits(tiny_group: MakeGroup) -> None:
    group = tiny_group(
        reduce_plan="sharded", total_rounds=6, num_replicas=2, checkpoint_every=100, codec="bf16"
    )
    reached = threading.Event()

    def watch(member: Any, joined: Any) -> None:
        if joined.round == 4:
            reached.set()

    early = [group.start(n, make_model=wide, on_step=watch) for n in range(2)]
    assert reached.wait(600)
    late = group.start(2, make_model=wide)
    group.wait()
    group.assert_agreed(*early, late)


TRAPS = [
    ("put", "rounds/00000002/reduced/*", "before"),
    ("put", "rounds/00000002/reduced/*", "after"),
    ("list", "rounds/00000002/reduced/", "before"),
    ("get", "rounds/00000002/contributions/*.bin", "before"),
    ("create", "rounds/00000002/commit.json", "before"),
    ("create", "rounds/00000002/commit.json", "after"),
    ("get", "rounds/00000002/reduced/*", "before"),
]


@matrix("trap", TRAPS, fast=2, ids=lambda trap: "-".join(trap))
def test_an_owner_killed_at_any_step_does_not_stop_the_others(
    tiny_group: MakeGroup, trap: tuple[str, str, str]
) -> None:
    group = tiny_group(reduce_plan="sharded", heartbeat_timeout_s=40.0)
    members = [group.start(0, make_model=wide, trap=group.trap(*trap))]
    members += [group.start(n, make_model=wide) for n in (1, 2)]
    group.wait()
    group.assert_agreed(*members[1:])
    commits = group.commits()
    assert [commit.round for commit in commits] == [1, 2, 3, 4]
    assert not any(commit.void for commit in commits)


@pytest.mark.parametrize("operation", ["put", "list"])
def test_the_replicas_finish_the_round_of_a_dead_syncer(
    tiny_group: MakeGroup, operation: str
) -> None:
    group = tiny_group(reduce_plan="syncer", heartbeat_timeout_s=100.0)
    group.start_syncer(trap=group.trap(operation, "rounds/00000002/reduced/*"))
    members = train(group)
    group.assert_agreed(*members)
    commits = group.commits()
    assert not any(commit.void for commit in commits) and commits[-1].last
    assert group.plan(2).mode == "syncer"


def test_replicas_gather_once_the_syncer_is_dead(tiny_group: MakeGroup) -> None:
    group = tiny_group(reduce_plan="syncer", heartbeat_timeout_s=100.0, total_rounds=1000)
    group.start_syncer(trap=group.trap("put", "rounds/00000002/reduced/*"))

    def leave(member: Any, joined: Any) -> None:
        if joined.round > 3 and group.plan(joined.round - 1).mode == "gather":
            joined.leave()

    members = train(group, on_step=leave)
    assert [member.error for member in members] == [None] * 3
    assert not any(commit.void for commit in group.commits())


def test_a_syncer_ends_with_the_run(tiny_group: MakeGroup) -> None:
    group = tiny_group(reduce_plan="syncer", total_rounds=2)
    train(group, syncer=True)
    group.syncers[0].join(600)
    assert not group.syncers[0].is_alive()


@pytest.mark.parametrize("damage", ["corrupt", "truncated", "missing"])
def test_a_damaged_slice_voids_a_sharded_round(tiny_group: MakeGroup, damage: str) -> None:
    group = tiny_group(reduce_plan="sharded")
    spoil = ("rounds/00000002/contributions/00000.*.bin", damage)  # replica 2's shard is at its end
    members = train(group, spoil=spoil)
    group.assert_agreed(*members)
    commits = group.commits()
    assert commits[1].void_replica == 0 and not commits[1].shards
    assert [bool(commit.void) for commit in commits] == [False, True, False, False, False]


def test_a_damaged_shard_is_reported_and_the_reader_loads_a_checkpoint(
    tiny_group: MakeGroup,
) -> None:
    group = tiny_group(reduce_plan="sharded", checkpoint_every=1, total_rounds=3)
    members = [group.start(n, make_model=wide) for n in range(2)]
    reader = group.start(2, make_model=wide, garble="rounds/00000002/reduced/*")
    group.wait()
    group.assert_agreed(*members, reader)
