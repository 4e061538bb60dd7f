"""Joining and leaving: scaling, joins during exchanges, and restored replica states."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco.protocol import keys
from diloco.protocol.records import Identity, LateReplica, Plan, PlannedContribution
from diloco.training.dynamic_steps import DynamicLocalUpdates
from diloco.training.replica_state import ReplicaState, StateWriter, load_replica_state
from tests.diloco.exchange.planned import planned
from tests.matrix import matrix

MakeGroup = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # the lease of a killed member
)


def test_a_run_grows_to_eight_replicas_and_shrinks_to_two(tiny_group: MakeGroup) -> None:
    group = tiny_group(num_replicas=1, total_rounds=10_000, checkpoint_every=3)
    seen = {8: threading.Event(), 2: threading.Event()}

    def watch(member: Any, joined: Any) -> None:
        commit = joined._loop.state.last_commit
        if commit is not None and len(commit.contributors) == 8:
            seen[8].set()
        if seen[8].is_set():
            if member.replica >= 2:
                joined.leave()
            elif commit is not None and len(commit.contributors) == 2:
                seen[2].set()
        if seen[2].is_set():
            # Both leave in one round, so that they end with equal weights.
            group.store.create(keys.control(1), stop())

    def stop() -> bytes:
        from diloco.protocol.records import Command

        return Command(n=1, command="stop", wall_s=0.0).to_bytes()

    members = [group.start(0, on_step=watch)]
    members += [group.start(n, on_step=watch) for n in range(1, 8)]
    group.wait()
    for member in members:
        assert member.error is None, repr(member.error)
    assert [m.reason for m in members] == ["stopped"] * 2 + ["left"] * 6
    sizes = [len(commit.contributors) for commit in group.commits()]
    assert max(sizes) == 8 and sizes[-1] <= 2
    assert [commit.round for commit in group.commits()] == list(range(1, len(sizes) + 1))


@matrix(
    ("plan", "mean_codec"),
    [("gather", "full"), ("sharded", "full"), ("sharded", "int8")],
    fast=[("sharded", "int8")],
)
@matrix("checkpoint_every", [3, 100], fast=1)
def test_a_replica_joins_while_fragments_are_exchanged(
    tiny_group: MakeGroup, plan: str, mean_codec: str, checkpoint_every: int
) -> None:
    """From a checkpoint between two rounds of a fragment, and from the log alone."""
    group = tiny_group(
        num_replicas=2,
        total_rounds=12,
        num_fragments=2,
        sync_every=4,
        overlap_steps=3,
        reduce_plan=plan,
        codec="int8",
        mean_codec=mean_codec,
        merge="rda",
        checkpoint_every=checkpoint_every,
    )
    reached = threading.Event()

    def watch(member: Any, joined: Any) -> None:
        if joined.round == 6:
            reached.set()

    early = [group.start(n, on_step=watch) for n in range(2)]
    assert reached.wait(600)
    late = group.start(5)
    group.wait()
    group.assert_log()
    group.assert_agreed(*early, late)
    if checkpoint_every == 100:
        assert torch.equal(late.weights(), group.replayed())


@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_a_relaunched_replica_restores_optimizer_and_counts(
    tiny_group: MakeGroup, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tiny_group(num_replicas=1, total_rounds=8, checkpoint_every=1, state_every=1)

    def until_round_four(member: Any, joined: Any) -> None:
        if joined.round == 4 and how == "leaves":
            joined.leave()

    trap = group.trap("put", "rounds/00000004/contributions/*.bin") if how == "dies" else None
    first = group.start(0, momentum=0.9, on_step=until_round_four, trap=trap)
    first.thread.join(600)
    saved = load_replica_state(group.store, 0)
    assert saved is not None and saved.round == 3
    buffers = saved.trees["inner_optimizer"]["state"]
    result: list[Any] = []
    restored: list[dict[int, list[float]]] = []
    load = torch.optim.SGD.load_state_dict

    def watched(optimizer: torch.optim.SGD, tree: Any) -> None:
        restored.append({k: v["momentum_buffer"].tolist() for k, v in tree["state"].items()})
        load(optimizer, tree)

    monkeypatch.setattr(torch.optim.SGD, "load_state_dict", watched)

    def first_step(member: Any, joined: Any) -> None:
        if not result:
            result.append((joined.schedule_step, joined._tokens_trained))

    second = group.start(0, momentum=0.9, on_step=first_step)
    group.wait(second)
    assert second.error is None
    assert restored == [{k: v["momentum_buffer"].tolist() for k, v in buffers.items()}]
    assert result == [(9, 9 * 8)]
    assert second.steps == 5 * 3, "rounds 4 to 8, from the global weights"


def test_old_saves_are_deleted_and_damaged_ones_skipped(tiny_group: MakeGroup) -> None:
    group = tiny_group()
    who = Identity(replica=3, incarnation="00001-00000000")
    for round in range(1, 6):
        state = ReplicaState(round=round, tokens=10, trees={"a": [round]}, residuals={})
        StateWriter(state).write(group.store, who, wall_s=0.0)
    kept = {info.key.split("/")[2] for info in group.store.list(keys.replica_state(3))}
    assert kept == {"00001-00000000.00000004", "00001-00000000.00000005"}
    folder = keys.replica_state_dir(3, who.incarnation, 5)
    group.store.put(f"{folder}state.safetensors", b"torn")
    result = load_replica_state(group.store, 3)
    assert result is not None and (result.round, result.trees["a"]) == (4, [4])


def test_residuals_are_restored_by_fragment(tiny_group: MakeGroup) -> None:
    group = tiny_group()
    who = Identity(replica=3, incarnation="00001-00000000")
    residual = torch.arange(5.0)
    state = ReplicaState(round=1, tokens=0, trees={}, residuals={2: residual})
    StateWriter(state).write(group.store, who, wall_s=0.0)
    result = load_replica_state(group.store, 3)
    assert result is not None and list(result.residuals) == [2]
    assert torch.equal(result.residuals[2], residual)


def worked(replica: int, steps: int, compute_s: float) -> PlannedContribution:
    identity = Identity(replica=replica, incarnation="00001-00000000")
    return planned(identity, steps=steps, compute_s=compute_s)


def test_dynamic_local_updates_follow_the_speeds_of_the_last_plan() -> None:
    pace = DynamicLocalUpdates()
    assert pace.steps(0, 100) == 100, "no speed is known yet"
    me = Identity(replica=0, incarnation="00001-00000000")
    contributions = (worked(0, 100, 10.0), worked(1, 33, 10.0), worked(2, 1, 1000.0))
    plan = Plan(
        round=1, fragment=0, mode="gather", planner=me, wall_s=0.0, contributions=contributions
    )
    pace.update(plan)
    assert [pace.steps(replica, 100) for replica in (0, 1, 2, 3)] == [100, 33, 1, 100]
    late = (LateReplica(replica=1, units=1.0, missed=1),)
    pace.update(replace(plan, contributions=(worked(0, 100, 5.0),), late=late))
    speeds = [pace.steps(replica, 100) for replica in (0, 1, 2)]
    assert speeds == [100, 16, 100], "a late replica keeps its speed, one that left does not"
