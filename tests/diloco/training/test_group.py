"""Replicas of a group over a real store: agreement, failures and commands."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from diloco.clock import SystemClock
from diloco.errors import FencedOut, ModelMismatch, ReplicaError
from diloco.exchange.reduce import Reduction
from diloco.exchange.timings import Timings
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol import keys
from diloco.protocol.records import CheckpointManifest, Command, Heartbeat
from diloco.protocol.telemetry import Segment
from diloco.store.base import LocalStore
from diloco.training.checkpoint import load_checkpoint, manifest_rounds
from diloco.training.final_result import read_final
from tests.matrix import matrix
from tests.servers import wait_until

MakeGroup = Callable[..., Any]


pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # the lease of a killed member
)


def test_all_replicas_end_with_the_same_bits_and_one_result(tiny_group: MakeGroup) -> None:
    group = tiny_group()
    members = [group.start(replica) for replica in range(3)]
    group.wait()
    group.assert_agreed(*members)
    commits = group.commits()
    assert [len(commit.contributors) for commit in commits] == [3, 3, 3, 3]
    assert [commit.last for commit in commits] == [False, False, False, True]
    assert commits[-1].tokens_total == 3 * 4 * 3 * 8
    assert all(member.steps == 4 * 3 and member.reason == "completed" for member in members)
    final = read_final(group.store)
    assert final is not None and final.round == 4 and final.reason == "completed"


def test_the_group_matches_the_diloco_algorithm(tiny_group: MakeGroup) -> None:
    """Compare with DiLoCo implemented with torch's optimizers (arXiv:2311.08105, algorithm 1)."""
    group = tiny_group(total_rounds=3, num_replicas=2, checkpoint_every=100)
    members = [group.start(replica) for replica in range(2)]
    group.wait()
    group.assert_agreed(*members)

    manifest = CheckpointManifest.from_bytes(group.store.get(keys.checkpoint_manifest(0)))
    shared = nn.Linear(4, 2)
    layout = Layout(shared)
    outer_state = OuterOptimizer(lr=0.7, momentum=0.9, numel=layout.numel)
    layout.write(load_checkpoint(group.store, manifest, layout, outer_state).weights)
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for round in range(3):
        outer.zero_grad()
        for replica in range(2):
            local = copy.deepcopy(shared)
            inner = torch.optim.SGD(local.parameters(), lr=0.05)
            for step in range(3):
                loss = group.batch_loss(local, replica, 3 * round + step)
                inner.zero_grad()
                loss.backward()
                inner.step()
            for parameter, trained in zip(shared.parameters(), local.parameters(), strict=True):
                change = (parameter.detach() - trained.detach()) / 2
                parameter.grad = change if parameter.grad is None else parameter.grad + change
        outer.step()
    torch.testing.assert_close(members[0].weights(), layout.read().detach(), rtol=1e-4, atol=1e-5)


def test_outer_sgd_with_lr_one_is_local_sgd(tiny_group: MakeGroup) -> None:
    """Outer SGD with learning rate 1 averages the parameters every H steps."""
    group = tiny_group(
        total_rounds=3, num_replicas=2, checkpoint_every=100, outer_lr=1.0, outer_momentum=0.0
    )
    members = [group.start(replica) for replica in range(2)]
    group.wait()
    group.assert_agreed(*members)
    manifest = CheckpointManifest.from_bytes(group.store.get(keys.checkpoint_manifest(0)))
    shared = nn.Linear(4, 2)
    layout = Layout(shared)
    outer = OuterOptimizer(lr=1.0, momentum=0.0, numel=layout.numel)
    layout.write(load_checkpoint(group.store, manifest, layout, outer).weights)
    for round in range(3):
        locals_ = [copy.deepcopy(shared) for _ in range(2)]
        for replica, local in enumerate(locals_):
            inner = torch.optim.SGD(local.parameters(), lr=0.05)
            for step in range(3):
                inner.zero_grad()
                group.batch_loss(local, replica, 3 * round + step).backward()
                inner.step()
        with torch.no_grad():
            for mean, *trained in zip(
                shared.parameters(), *(local.parameters() for local in locals_), strict=True
            ):
                mean.copy_(torch.stack(trained).mean(0))
    torch.testing.assert_close(members[0].weights(), layout.read(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_a_late_joiner_replays_the_log_to_the_same_bits(tiny_group: MakeGroup, codec: str) -> None:
    group = tiny_group(total_rounds=6, num_replicas=2, checkpoint_every=100, codec=codec)
    reached = threading.Event()

    def watch(member: Any, joined: Any) -> None:
        if joined.round == 4:
            reached.set()

    early = [group.start(replica, on_step=watch) for replica in range(2)]
    assert reached.wait(600)
    late = group.start(2)
    group.wait()
    group.assert_agreed(*early, late)


TRAPS = [
    ("put", "rounds/00000002/contributions/*.bin", "before"),
    ("put", "rounds/00000002/contributions/*.bin", "after"),
    ("put", "rounds/00000002/contributions/*.json", "after"),
    ("create", "rounds/00000002/plan.json", "before"),
    ("create", "rounds/00000002/plan.json", "after"),
    ("get", "rounds/00000002/contributions/*.bin", "before"),
    ("create", "rounds/00000002/commit.json", "before"),
    ("create", "rounds/00000002/commit.json", "after"),
    ("put", "checkpoints/00000002/*", "after"),
    ("create", "checkpoints/00000002/manifest.json", "after"),
    ("put", "final/*", "after"),
]


@matrix("trap", TRAPS, fast=[TRAPS[1], TRAPS[7]], ids=lambda trap: "-".join(trap))
def test_a_replica_killed_at_any_step_does_not_stop_the_group(
    tiny_group: MakeGroup, trap: tuple[str, str, str]
) -> None:
    """I4: the first replica at the step is killed: planner, committer, checkpointer, publisher."""
    group = tiny_group(heartbeat_timeout_s=40.0, num_replicas=3)
    members = [group.start(replica, trap=group.trap(*trap)) for replica in range(1)]
    members += [group.start(replica) for replica in (1, 2)]
    group.wait()
    survivors = members[1:]
    group.assert_agreed(*survivors)
    commits = group.commits()
    assert [commit.round for commit in commits] == [1, 2, 3, 4]
    assert not any(commit.void for commit in commits)
    assert commits[-1].last
    assert read_final(group.store) is not None


def test_a_killed_replica_returns_as_a_new_incarnation(tiny_group: MakeGroup) -> None:
    group = tiny_group(heartbeat_timeout_s=40.0, total_rounds=8)
    died = threading.Event()
    others = [group.start(replica) for replica in (1, 2)]
    first = group.start(0, trap=group.trap("put", "rounds/00000002/contributions/*.bin", "after"))
    first.thread.join(600)
    died.set()
    second = group.start(0)
    group.wait()
    group.assert_agreed(second, *others)
    incarnations = {
        identity.incarnation
        for commit in group.commits()
        for identity in commit.contributors
        if identity.replica == 0
    }
    assert {keys.incarnation_seq(name) for name in incarnations} <= {1, 2}


def test_a_process_with_a_newer_incarnation_exits(tiny_group: MakeGroup) -> None:
    group = tiny_group(total_rounds=1000, num_replicas=1)
    started = threading.Event()
    old = group.start(0, on_step=lambda member, joined: started.set())
    assert started.wait(600)
    beat = Heartbeat(
        replica=0,
        incarnation="00002-ffffffff",
        count=1,
        interval_s=1.0,
        state="computing",
        round=1,
        step=0,
        tokens=0,
        started_wall_s=0.0,
        wall_s=0.0,
    )
    group.store.put(keys.beat(0, "00002-ffffffff"), beat.to_bytes())
    group.wait(old)
    assert isinstance(old.error, FencedOut)


@pytest.mark.parametrize("damage", ["corrupt", "truncated", "missing"])
def test_a_damaged_payload_voids_the_round_and_loses_nothing(
    tiny_group: MakeGroup, damage: str
) -> None:
    group = tiny_group(num_replicas=3)
    spoil = ("rounds/00000002/contributions/00002.*.bin", damage)
    members = [group.start(replica, spoil=spoil) for replica in range(3)]
    group.wait()
    group.assert_agreed(*members)
    commits = group.commits()
    assert commits[1].void.startswith("payload of replica 2: expected")
    assert commits[1].void_replica == 2
    assert [bool(commit.void) for commit in commits] == [False, True, False, False, False]
    # The next round contains the work of the void round: no progress is lost or counted twice.
    assert [sum(c.steps for c in group.plan(r).contributions) for r in (1, 2, 3)] == [9, 9, 18]
    assert commits[-1].tokens_total == 3 * 5 * 3 * 8


def test_late_work_is_rebased_and_counted_once(tiny_group: MakeGroup) -> None:
    group = tiny_group(num_replicas=2, grace_s=0.0, total_rounds=5)
    first_commit, both = threading.Event(), threading.Event()

    def watch(member: Any, joined: Any) -> None:
        if member.replica == 0 and joined.round == 2:
            first_commit.set()
        if member.replica == 0 and joined.round == 3:
            assert both.wait(600)
        if member.replica == 1 and joined.round == 4:  # it has contributed to round 3
            both.set()
        if member.replica == 1 and member.steps == 3:  # all steps of round 1, not contributed yet
            assert first_commit.wait(600)
            late.append(Layout(member.model).read().clone())

    late: list[torch.Tensor] = []
    members = [group.start(replica, on_step=watch) for replica in range(2)]
    group.wait()
    group.assert_agreed(*members)
    assert [c.replica for c in group.commits()[0].contributors] == [0]
    steps = [c.steps for r in range(1, 6) for c in group.plan(r).contributions if c.replica == 1]
    assert steps[0] >= 6, "the steps of the missed round are in the next contribution"
    assert sum(steps) <= members[1].steps, "and nothing counts twice"


def test_non_finite_weights_never_reach_the_group(tiny_group: MakeGroup) -> None:
    # The first two of a round wait two seconds for the third one, also on a busy machine.
    group = tiny_group(grace_s=100.0, min_quorum=2)
    others_are_through = threading.Event()

    def poison(member: Any, joined: Any) -> None:
        # Until the others have committed round 2 without it, with a limit.
        if member.replica == 1 and joined.round == 2:
            assert others_are_through.wait(600)
            with torch.no_grad():
                member.model.weight.fill_(float("nan"))
        if member.replica == 0 and joined.round == 3:
            others_are_through.set()

    members = [group.start(replica, on_step=poison) for replica in range(3)]
    group.wait()
    group.assert_agreed(*members)
    assert bool(torch.isfinite(members[0].weights()).all())
    who = [[c.replica for c in commit.contributors] for commit in group.commits()]
    assert who[1] == [0, 2]


def test_weights_that_never_stay_finite_end_the_replica(tiny_group: MakeGroup) -> None:
    group = tiny_group(num_replicas=1)

    def poison(member: Any, joined: Any) -> None:
        with torch.no_grad():
            member.model.weight.fill_(float("inf"))

    member = group.start(0, on_step=poison)
    group.wait()
    assert isinstance(member.error, ReplicaError)
    assert "found NaN or infinity 10 times in a row" in str(member.error)
    assert not group.commits()


def test_a_different_model_is_refused(tiny_group: MakeGroup) -> None:
    group = tiny_group(num_replicas=1, total_rounds=1)
    group.wait(group.start(0))
    other = group.start(1, make_model=lambda: nn.Linear(5, 2))
    group.wait(other)
    assert isinstance(other.error, ModelMismatch)
    assert "expected the group's model with fingerprint" in str(other.error)
    beats = [info.key for info in group.store.list("members/00001/")]
    beat = Heartbeat.from_bytes(group.store.get(beats[0]))
    assert beat.state == "failed" and "expected the group's model" in beat.message
    assert "found" in _logs(group.store, 1)


def _logs(store: LocalStore, replica: int) -> str:
    segments = [
        Segment.from_bytes(store.get(info.key)) for info in store.list(f"telemetry/{replica:05d}/")
    ]
    assert segments[-1].last
    return "\n".join(line.message for segment in segments for line in segment.logs)


def test_stop_ends_all_replicas_at_a_committed_round(tiny_group: MakeGroup) -> None:
    group = tiny_group(total_rounds=100_000)
    reached = threading.Event()

    def watch(member: Any, joined: Any) -> None:
        if joined.round == 3:
            reached.set()

    members = [group.start(replica, on_step=watch) for replica in range(3)]
    assert reached.wait(600)
    group.store.create(keys.control(1), Command(n=1, command="stop", wall_s=0.0).to_bytes())
    group.wait()
    assert all(member.reason == "stopped" and member.error is None for member in members)
    final = read_final(group.store)
    assert final is not None and final.reason == "stopped" and final.round >= 2
    assert final.round <= len(group.commits())


def test_a_save_command_writes_one_checkpoint(
    tiny_group: MakeGroup,
) -> None:
    group = tiny_group(total_rounds=9, checkpoint_every=100)
    command = Command(n=1, command="save", arguments={"round": 4}, wall_s=0.0)
    group.store.create(keys.control(1), command.to_bytes())

    def wait_for_checkpoint(member: Any, joined: Any) -> None:
        """After round 6 another replica would write one, if that of round 5 is not complete."""
        if joined.round == 6:
            wait_until(lambda: 5 in manifest_rounds(group.store), "the checkpoint")

    members = [group.start(replica, on_step=wait_for_checkpoint) for replica in range(3)]
    group.wait()
    group.assert_agreed(*members)
    assert manifest_rounds(group.store) == [0, 5, 9]


def test_a_stopped_group_resumes(tiny_group: MakeGroup) -> None:
    """After a stop and a kill of all replicas, a resume lets new processes finish the run."""
    group = tiny_group(num_replicas=2, total_rounds=5)
    trap = group.trap("create", keys.commit(2), "before")
    dead = [group.start(replica, trap=trap) for replica in range(2)]
    group.wait()
    assert all(member.error for member in dead)
    done = len(group.commits())
    for n, name in enumerate(("stop", "resume"), start=1):
        group.store.create(keys.control(n), Command(n=n, command=name, wall_s=0.0).to_bytes())
    members = [group.start(replica) for replica in range(2)]
    group.wait(*members)
    group.assert_agreed(*members)
    assert [member.reason for member in members] == ["completed", "completed"]
    assert done < len(group.assert_log()) == 5


def test_a_replica_that_joins_an_ended_run_leaves_at_once(tiny_group: MakeGroup) -> None:
    group = tiny_group(num_replicas=1, total_rounds=2)
    first = group.start(0)
    group.wait()
    again = group.start(0)
    group.wait()
    assert again.error is None and again.reason == "completed" and again.steps == 0
    group.assert_agreed(first, again)


def test_a_replica_can_join_after_old_objects_are_swept(
    tiny_group: MakeGroup,
) -> None:
    group = tiny_group(num_replicas=1, total_rounds=9, checkpoint_every=2)
    group.wait(group.start(0))
    payloads = [info.key for info in group.store.list("rounds/") if info.key.endswith(".bin")]
    assert [key.split("/")[1] for key in payloads] == ["00000009"]
    kept = [
        i.key for i in group.store.list("checkpoints/") if i.key.endswith("weights.safetensors")
    ]
    assert [key.split("/")[1] for key in kept] == ["00000008", "00000009"]
    assert len(group.commits()) == 9
    joiner = group.start(5)
    group.wait(joiner)
    group.assert_agreed(group.members[0], joiner)


def test_the_global_state_is_a_function_of_checkpoint_and_log(tiny_group: MakeGroup) -> None:
    """I3: replay checkpoint 0 and the committed payloads."""
    group = tiny_group(checkpoint_every=100)
    members = [group.start(replica) for replica in range(3)]
    group.wait()
    layout = Layout(nn.Linear(4, 2))
    outer = OuterOptimizer(lr=0.7, momentum=0.9, numel=layout.numel)
    manifest = CheckpointManifest.from_bytes(group.store.get(keys.checkpoint_manifest(0)))
    weights = load_checkpoint(group.store, manifest, layout, outer).weights
    timings = Timings(SystemClock())
    for commit in group.commits():
        plan = group.plan(commit.round)
        merged = Reduction(
            group.store, group.settings, plan, layout.slots, timings=timings
        ).gather()
        assert merged.digest == commit.merged_digest
        outer.step(weights, merged.vector)
    assert torch.equal(weights, members[0].weights())


def test_a_replica_whose_payloads_are_always_damaged_does_not_stop_the_group(
    tiny_group: MakeGroup,
) -> None:
    group = tiny_group(total_rounds=4, checkpoint_every=1)
    members = [group.start(n) for n in (0, 1)]
    group.start(2, spoil=("rounds/*/contributions/00002.*.bin", "corrupt"))
    group.wait()
    group.assert_agreed(*members)
    assert group.assert_log()[-1].committed_total == 4


def test_below_quorum_the_run_waits_without_limit(tiny_group: MakeGroup) -> None:
    group = tiny_group(
        num_replicas=2,
        min_quorum=2,
        start_wait_s=0.0,
        grace_s=5.0,
        round_timeout_s=100.0,
        heartbeat_timeout_s=15.0,
        total_rounds=1,
    )
    first = group.start(0)
    first.thread.join(3.0)  # 150 seconds on the group's clock
    assert first.thread.is_alive()
    second = group.start(1)
    group.wait()
    group.assert_agreed(first, second)
