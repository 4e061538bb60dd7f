"""Replicas of several ranks, in real processes over gloo: one of two ranks and one of one.

The processes run ``ranks_program.py``, once for all tests of this module."""

from __future__ import annotations

import json
import os
import signal
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
from diloco.training.checkpoint import manifest_rounds
from diloco.training.final_result import read_final
from tests import torch_process

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"num_replicas": 2},
    "fsdp": {"num_replicas": 2},
    "overlap": {"num_replicas": 2, "num_fragments": 2, "overlap_steps": 1, "total_rounds": 6},
    "non-finite": {},
    "between": {"checkpoint_every": 100},
    "resumed": {"state_every": 1, "total_rounds": 6},
    "handed-in": {},
    "leader-waits": {"num_replicas": 2, "min_quorum": 2, "start_wait_s": 0.0},
    "follower-raises": {},
    "leader-raises": {},
    "leader-raises-in-step": {},
    "follower-parts": {},
    "other-model": {},
    "killed": {},
}
NAMES = ["body.bias", "body.weight", "embed.weight", "frozen", "scale"]


class Played:
    """The results of the scenarios."""

    def __init__(self, root: Path, exits: list[int]) -> None:
        self.root = root
        self.exits = exits

    def store(self, name: str) -> LocalStore:
        return LocalStore(self.root / "runs" / name)

    def observed(self, name: str, place: int) -> Any:
        return json.loads((self.root / f"{name}.{place}.json").read_text())


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    root = tmp_path_factory.mktemp("ranks")
    for name, more in SETTINGS.items():
        settings: dict[str, Any] = {
            "sync_every": 4,
            "total_rounds": 3,
            "num_replicas": 1,
            "warmup_steps": 0,
            "eval_every": 1,
            "codec": "fp32",
            "checkpoint_every": 2,
            "start_wait_s": 120.0,
            "round_timeout_s": 120.0,
            "heartbeat_timeout_s": 60.0,
            **more,
        }
        create_group(str(root / "runs" / name), GroupSettings(**settings))
    program = Path(__file__).with_name("ranks_program.py")
    processes = [
        torch_process.start(
            [program, root, str(place)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            output=root / f"{place}.log",
        )
        for place in range(3)
    ]
    return Played(root, torch_process.wait(processes, 300))


@pytest.mark.parametrize("name", ["ddp", "fsdp", "overlap"])
def test_all_ranks_of_all_replicas_end_with_the_same_bits(played: Played, name: str) -> None:
    observed = [played.observed(name, place) for place in range(3)]
    assert [s.get("error") for s in observed] == [None] * 3
    assert [s["reason"] for s in observed] == ["completed"] * 3
    assert observed[0]["weights"] == observed[1]["weights"] == observed[2]["weights"]
    assert [s["names"] for s in observed] == [NAMES] * 3
    final = read_final(played.store(name))
    assert final is not None
    tensors = load_safetensors(played.store(name).get(final.weights.key))
    assert sorted(tensors) == NAMES, "names and shapes are the bare model's"
    assert tensors["embed.weight"].shape == (5, 3)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "overlap"])
def test_all_ranks_see_the_same_positions(played: Played, name: str) -> None:
    leader, follower = played.observed(name, 0), played.observed(name, 1)
    for what in ("joined", "position", "steps", "evaluated"):
        assert leader[what] == follower[what], what
    assert leader["joined"] == [1, 0, 0]


def test_tokens_are_summed_over_the_ranks_and_losses_averaged_by_tokens(played: Played) -> None:
    for round in (1, 2, 3):
        plan = Plan.from_bytes(played.store("ddp").get(keys.plan(round)))
        own, peer = plan.contributions
        assert (own.replica, own.tokens, own.steps) == (0, 4 * (8 + 16), 4)
        assert own.loss == pytest.approx((8 * 1.0 + 16 * 4.0) / 24)
        assert (peer.replica, peer.tokens) == (1, 4 * 8)
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
        own = Plan.from_bytes(store.get(keys.plan(round))).contributions[0]
        assert own.replica == 0 and own.loss == pytest.approx(3.0)


def test_a_step_without_an_exchange_sends_one_message(played: Played) -> None:
    for place in (0, 1):
        words = played.observed("ddp", place)["messages"]
        assert [n for step, n in enumerate(words) if step % 4 != 3] == [1] * 9
        assert all(n > 1 for n in words[3::4])
    assert played.observed("ddp", 2)["messages"] == [0] * 12


def test_a_sharded_model_is_read_and_written_whole_on_every_rank(played: Played) -> None:
    for place in (0, 1):
        observed = played.observed("layout", place)
        assert "error" not in observed, observed
        assert observed["read"] == [float(n) for n in range(27)]
        assert observed["read_after_forward"] == [float(n + 1) for n in range(27)]
        assert observed["computed"] == observed["expected"], (
            "the next forward pass sees what was written"
        )
        assert observed["hash"] == observed["bare_hash"]


def test_non_finite_weights_reset_the_optimizers_of_all_ranks(played: Played) -> None:
    for place in (0, 1):
        observed = played.observed("non-finite", place)
        assert observed["reason"] == "completed"
        assert (observed["steps"], observed["adam_steps"]) == (16, 12), "four steps were discarded"


def test_hooks_and_evaluations_run_on_all_ranks(played: Played) -> None:
    ranks = [played.observed("between", place) for place in range(2)]
    assert ranks[0]["hooks"] == ranks[1]["hooks"] and ranks[0]["swapped"] == ranks[1]["swapped"]
    hooks = ranks[0]["hooks"]
    assert [hook[:2] for hook in hooks] == [
        [shown, 0.5] for round in (1, 2, 3) for shown in (round, "included")
    ]
    swapped = ranks[0]["swapped"]
    assert [(differs, restored) for _, differs, restored in swapped] == [(True, True)] * 3
    assert [inside for inside, *_ in swapped[1:]] == [hook[2] for hook in hooks[1::2]][:2]


def test_a_checkpoint_that_all_ranks_request_is_written_once_a_round(played: Played) -> None:
    assert manifest_rounds(played.store("between")) == [0, 1, 2, 3]


def test_a_relaunched_replica_restores_all_ranks(played: Played) -> None:
    for place in (0, 1):
        first, second = played.observed("first-half", place), played.observed("second-half", place)
        assert first["reason"] == "left", "a follower had a shutdown request, and all ranks left"
        assert second["joined"] == [3, 8, 8]
        assert second["restored"] == first["kept"]
        assert second["restored"]["count"] == 8 and second["restored"]["moments"] > 0
        assert second["reason"] == "completed"
    parts = [played.observed("second-half", place)["restored"]["moments"] for place in (0, 1)]
    assert parts[0] != parts[1], "each rank has its own part"


def test_a_drained_replica_contributes_the_steps_of_all_ranks(played: Played) -> None:
    for place in (0, 1):
        observed = played.observed("handed-in", place)
        assert (observed["reason"], observed["steps"]) == ("left", 7)
    plan = Plan.from_bytes(played.store("handed-in").get(keys.plan(2)))
    assert [(c.steps, c.new_tokens) for c in plan.contributions] == [(3, 3 * (8 + 16))]


def test_a_signal_of_another_rank_is_noticed_while_the_leader_waits(played: Played) -> None:
    for place in (0, 1):
        observed = played.observed("leader-waits", place)
        assert (observed["reason"], observed["steps"]) == ("left", 4)


@pytest.mark.parametrize(
    ("name", "failing", "own", "error_text"),
    [
        ("follower-raises", 1, "KeyError: 'out of luck'", "rank 1: KeyError: 'out of luck'"),
        ("leader-raises", 0, "KeyError: 'out of luck'", "rank 0: KeyError: 'out of luck'"),
        ("leader-raises-in-step", 0, "KeyError: 'no test set'", "rank 0: KeyError: 'no test set'"),
        ("no-group", 0, "ReplicaError: expected group.json", "rank 0: ReplicaError: expected"),
    ],
)
def test_an_error_on_one_rank_reaches_all_ranks(
    played: Played, name: str, failing: int, own: str, error_text: str
) -> None:
    assert played.observed(name, failing)["error"].startswith(own)
    other = played.observed(name, 1 - failing)
    assert other["replica_error"] is True
    assert error_text in other["error"]


def test_a_rank_that_leaves_alone_is_an_error_on_all(played: Played) -> None:
    leader, follower = played.observed("follower-parts", 0), played.observed("follower-parts", 1)
    assert "another rank of this replica has left its training loop" in leader["error"]
    assert "found that rank 1 left alone" in follower["error"]


def test_ranks_with_different_models_are_refused(played: Played) -> None:
    for place in (0, 1):
        error = played.observed("other-model", place)["error"]
        assert error.startswith(
            "ModelMismatch: expected the leader's model on all ranks of the replica"
        )


def test_followers_detect_a_killed_leader(played: Played) -> None:
    assert played.exits == [-signal.SIGKILL, 0, 0]
    observed = played.observed("killed", 1)
    assert observed["replica_error"] is True
    assert "rank 1 lost another rank of its replica" in observed["error"]
    assert not (played.root / "killed.0.json").exists()
