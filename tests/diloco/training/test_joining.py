"""Members come and go: scaling, spares of time, and what a relaunch takes up again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diloco.protocol import keys
from diloco.protocol.records import Identity, Plan, PlannedContribution
from diloco.training.dynamic_steps import Pace
from diloco.training.replica_state import ReplicaState, load_replica_state, save_replica_state

MakeGroup = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # the lease of a killed member
)


def test_one_run_grows_from_one_to_eight_and_shrinks_to_two(tiny_group: MakeGroup) -> None:
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
            # The same round for both, so that they end with the same weights.
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


@pytest.mark.parametrize("plan", ["gather", "sharded"])
@pytest.mark.parametrize("checkpoint_every", [3, 100])
def test_a_joiner_gets_in_while_fragments_are_exchanged_in_the_background(
    tiny_group: MakeGroup, plan: str, checkpoint_every: int
) -> None:
    """From a checkpoint between two rounds of a fragment, and from the log alone."""
    group = tiny_group(
        num_replicas=2, total_rounds=12, num_fragments=2, sync_every=4, overlap_steps=3,
        reduce_plan=plan, codec="int8", merge="rda", checkpoint_every=checkpoint_every,
    )  # fmt: skip
    reached = threading.Event()

    def watch(member: Any, joined: Any) -> None:
        if joined.round == 6:
            reached.set()

    early = [group.start(n, on_step=watch) for n in range(2)]
    assert reached.wait(60)
    late = group.start(5)
    group.wait()
    group.assert_log()
    group.assert_agreed(*early, late)
    if checkpoint_every == 100:
        assert torch.equal(late.weights(), group.replayed())


@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_a_relaunch_takes_up_its_inner_optimizer_and_its_count(
    tiny_group: MakeGroup, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tiny_group(num_replicas=1, total_rounds=8, checkpoint_every=1, state_every=1)

    def until_round_four(member: Any, joined: Any) -> None:
        if joined.round == 4 and how == "leaves":
            joined.leave()

    trap = group.trap("put", "rounds/00000004/contributions/*.bin") if how == "dies" else None
    first = group.start(0, momentum=0.9, on_step=until_round_four, trap=trap)
    first.thread.join(60)
    saved = load_replica_state(group.store, 0)
    assert saved is not None and saved.round == 3
    buffers = saved.trees["inner_optimizer"]["state"]
    found: list[Any] = []
    restored: list[dict[int, list[float]]] = []
    load = torch.optim.SGD.load_state_dict

    def watched(optimizer: torch.optim.SGD, tree: Any) -> None:
        restored.append({k: v["momentum_buffer"].tolist() for k, v in tree["state"].items()})
        load(optimizer, tree)

    monkeypatch.setattr(torch.optim.SGD, "load_state_dict", watched)

    def first_step(member: Any, joined: Any) -> None:
        if not found:
            found.append((joined.schedule_step, joined._tokens_trained))

    second = group.start(0, momentum=0.9, on_step=first_step)
    group.wait(second)
    assert second.error is None
    assert restored == [{k: v["momentum_buffer"].tolist() for k, v in buffers.items()}]
    assert found == [(9, 9 * 8)]
    assert second.steps == 5 * 3, "rounds 4 to 8, from the global weights"


def test_old_saves_are_removed_and_a_damaged_one_is_passed_over(tiny_group: MakeGroup) -> None:
    group = tiny_group()
    who = Identity(replica=3, incarnation="00001-00000000")
    for round in range(1, 6):
        state = ReplicaState(round=round, tokens=10, trees={"a": [round]}, residuals={})
        save_replica_state(group.store, who, state, wall_s=0.0)
    kept = {info.key.split("/")[2] for info in group.store.list(keys.replica_state(3))}
    assert kept == {"00001-00000000.00000004", "00001-00000000.00000005"}
    folder = keys.replica_state_dir(3, who.incarnation, 5)
    group.store.put(f"{folder}state.safetensors", b"torn")
    found = load_replica_state(group.store, 3)
    assert found is not None and (found.round, found.trees["a"]) == (4, [4])


def test_a_residual_comes_back_with_its_fragment(tiny_group: MakeGroup) -> None:
    group = tiny_group()
    who = Identity(replica=3, incarnation="00001-00000000")
    residual = torch.arange(5.0)
    state = ReplicaState(round=1, tokens=0, trees={}, residuals={2: residual})
    save_replica_state(group.store, who, state, wall_s=0.0)
    found = load_replica_state(group.store, 3)
    assert found is not None and list(found.residuals) == [2]
    assert torch.equal(found.residuals[2], residual)


def planned(replica: int, steps: int, compute_s: float) -> PlannedContribution:
    return PlannedContribution(
        replica=replica, incarnation="00001-00000000", weight=0.5, tokens=1, new_tokens=1,
        steps=steps, compute_s=compute_s, loss=0.0, size_bytes=0, digest="", checksums="",
    )  # fmt: skip


def test_dynamic_local_updates_follow_the_speeds_of_the_last_plan() -> None:
    pace = Pace()
    assert pace.steps(0, 100) == 100, "nothing is known yet"
    me = Identity(replica=0, incarnation="00001-00000000")
    contributions = (planned(0, 100, 10.0), planned(1, 33, 10.0), planned(2, 1, 1000.0))
    plan = Plan(
        round=1, fragment=0, mode="gather", planner=me, wall_s=0.0, contributions=contributions
    )
    pace.learn(plan)
    assert [pace.steps(replica, 100) for replica in (0, 1, 2, 3)] == [100, 33, 1, 100]
