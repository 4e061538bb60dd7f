"""Replicas of many ranks, in real processes over gloo: one of two ranks beside one of one rank.

What the processes do is in ``ranks_program.py``; they run once for all tests here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load as load_safetensors

from diloco.init import create_group
from diloco.protocol import keys
from diloco.protocol.records import Commit, Plan
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import Segment
from diloco.store.base import LocalStore
from diloco.training.checkpoint import read_final

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"num_replicas": 2},
    "fsdp": {"num_replicas": 2},
    "overlap": {"num_replicas": 2, "num_fragments": 2, "overlap_steps": 1, "total_rounds": 6},
    "non-finite": {},
    "resumed": {"state_every": 1, "total_rounds": 6},
    "handed-in": {},
    "follower-raises": {},
    "leader-raises": {},
    "leader-raises-in-step": {},
    "follower-parts": {},
    "other-model": {},
    "killed": {},
}
NAMES = ["body.bias", "body.weight", "embed.weight", "frozen", "scale"]


class Played:
    """What became of the scenarios."""

    def __init__(self, root: Path, exits: list[int]) -> None:
        self.root = root
        self.exits = exits

    def store(self, name: str) -> LocalStore:
        return LocalStore(self.root / "runs" / name)

    def said(self, name: str, place: int) -> Any:
        return json.loads((self.root / f"{name}.{place}.json").read_text())


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    root = tmp_path_factory.mktemp("ranks")
    for name, more in SETTINGS.items():
        settings: dict[str, Any] = {
            "sync_every": 4, "total_rounds": 3, "num_replicas": 1, "warmup_steps": 0,
            "eval_every": 1, "codec": "fp32", "checkpoint_every": 2, "start_wait_s": 120.0,
            "round_timeout_s": 120.0, "heartbeat_timeout_s": 60.0, **more,
        }  # fmt: skip
        create_group(str(root / "runs" / name), GroupSettings(**settings))
    program = Path(__file__).with_name("ranks_program.py")
    logs = [(root / f"{place}.log").open("wb") for place in range(3)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(root), str(place)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=logs[place],
            stderr=subprocess.STDOUT,
        )
        for place in range(3)
    ]
    try:
        exits = [process.wait(300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    return Played(root, exits)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "overlap"])
def test_all_ranks_of_all_replicas_end_with_the_same_bits(played: Played, name: str) -> None:
    said = [played.said(name, place) for place in range(3)]
    assert [s.get("error") for s in said] == [None] * 3
    assert [s["reason"] for s in said] == ["completed"] * 3
    assert said[0]["weights"] == said[1]["weights"] == said[2]["weights"]
    assert [s["names"] for s in said] == [NAMES] * 3
    final = read_final(played.store(name))
    assert final is not None
    tensors = load_safetensors(played.store(name).get(final.weights.key))
    assert sorted(tensors) == NAMES, "names and shapes are the bare model's"
    assert tensors["embed.weight"].shape == (5, 3)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "overlap"])
def test_ranks_go_in_step(played: Played, name: str) -> None:
    leader, follower = played.said(name, 0), played.said(name, 1)
    for what in ("joined", "position", "steps", "evaluated"):
        assert leader[what] == follower[what], what
    assert leader["joined"] == [1, 0, 0]


def test_tokens_are_summed_over_the_ranks_and_losses_averaged_by_tokens(played: Played) -> None:
    for round in (1, 2, 3):
        plan = Plan.from_bytes(played.store("ddp").get(keys.plan(round)))
        ours, theirs = plan.contributions
        assert (ours.replica, ours.tokens, ours.steps) == (0, 4 * (8 + 16), 4)
        assert ours.loss == pytest.approx((8 * 1.0 + 16 * 4.0) / 24)
        assert (theirs.replica, theirs.tokens) == (1, 4 * 8)
        commit = Commit.from_bytes(played.store("ddp").get(keys.commit(round)))
        assert commit.tokens_total == round * 4 * (8 + 16 + 8)
    segments = [
        Segment.from_bytes(played.store("ddp").get(info.key))
        for info in played.store("ddp").list("telemetry/00000/")
    ]
    losses = [loss for segment in segments for loss in segment.steps.loss]
    assert len(losses) == 12 and losses[-1] == pytest.approx(3.0)


def test_losses_that_stay_on_a_gpu_are_averaged_there(played: Played) -> None:
    store = played.store("overlap")
    for round in range(1, 7):
        ours = Plan.from_bytes(store.get(keys.plan(round))).contributions[0]
        assert ours.replica == 0 and ours.loss == pytest.approx(3.0)


def test_a_step_without_an_exchange_costs_one_word(played: Played) -> None:
    for place in (0, 1):
        words = played.said("ddp", place)["words"]
        assert [n for step, n in enumerate(words) if step % 4 != 3] == [1] * 9
        assert all(n > 1 for n in words[3::4])
    assert played.said("ddp", 2)["words"] == [0] * 12


def test_a_sharded_model_is_read_and_written_whole_on_every_rank(played: Played) -> None:
    for place in (0, 1):
        said = played.said("layout", place)
        assert "error" not in said, said
        assert said["read"] == [float(n) for n in range(27)]
        assert said["read_after_forward"] == [float(n + 1) for n in range(27)]
        assert said["computed"] == said["expected"], "the next forward pass sees what was written"
        assert said["hash"] == said["bare_hash"]


def test_non_finite_weights_reset_the_optimizers_of_all_ranks(played: Played) -> None:
    for place in (0, 1):
        said = played.said("non-finite", place)
        assert said["reason"] == "completed"
        assert (said["steps"], said["adam_steps"]) == (16, 12), "four steps were thrown away"


def test_a_replica_that_is_launched_again_goes_on_on_all_ranks(played: Played) -> None:
    for place in (0, 1):
        first, second = played.said("first-half", place), played.said("second-half", place)
        assert first["reason"] == "left", "a follower was asked to leave, and all left"
        assert second["joined"] == [3, 8, 8]
        assert second["restored"] == first["kept"]
        assert second["restored"]["count"] == 8 and second["restored"]["moments"] > 0
        assert second["reason"] == "completed"
    parts = [played.said("second-half", place)["restored"]["moments"] for place in (0, 1)]
    assert parts[0] != parts[1], "each rank has its own part"


def test_a_replica_that_is_asked_in_time_hands_in_what_all_ranks_have_done(played: Played) -> None:
    for place in (0, 1):
        said = played.said("handed-in", place)
        assert (said["reason"], said["steps"]) == ("left", 7)
    plan = Plan.from_bytes(played.store("handed-in").get(keys.plan(2)))
    assert [(c.steps, c.new_tokens) for c in plan.contributions] == [(3, 3 * (8 + 16))]


@pytest.mark.parametrize(
    ("name", "failing", "own", "told"),
    [
        ("follower-raises", 1, "KeyError: 'out of luck'", "rank 1: KeyError: 'out of luck'"),
        ("leader-raises", 0, "KeyError: 'out of luck'", "rank 0: KeyError: 'out of luck'"),
        ("leader-raises-in-step", 0, "KeyError: 'no test set'", "rank 0: KeyError: 'no test set'"),
        ("no-group", 0, "ReplicaError: expected group.json", "rank 0: ReplicaError: expected"),
    ],
)
def test_an_error_on_one_rank_reaches_the_other(
    played: Played, name: str, failing: int, own: str, told: str
) -> None:
    assert played.said(name, failing)["error"].startswith(own)
    other = played.said(name, 1 - failing)
    assert other["replica_error"] is True
    assert told in other["error"]


def test_a_rank_that_parts_alone_is_an_error_on_all(played: Played) -> None:
    leader, follower = played.said("follower-parts", 0), played.said("follower-parts", 1)
    assert "another rank of this replica has left its training loop" in leader["error"]
    assert "found that rank 1 left alone" in follower["error"]


def test_ranks_with_different_models_are_refused(played: Played) -> None:
    for place in (0, 1):
        error = played.said("other-model", place)["error"]
        assert error.startswith("ModelMismatch: expected one model on all ranks of the replica")


def test_a_killed_leader_is_noticed_by_its_followers(played: Played) -> None:
    assert played.exits == [-signal.SIGKILL, 0, 0]
    said = played.said("killed", 1)
    assert said["replica_error"] is True
    assert "rank 1 lost another rank of its replica" in said["error"]
    assert not (played.root / "killed.0.json").exists()
