"""I4 with fragments exchanged in the background: death at any step, slow peers, everyone dead."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from diloco.clock import SystemClock
from diloco.exchange.reduce import Reducer
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol import keys
from diloco.protocol.records import CheckpointManifest
from diloco.store.base import MissingKey
from diloco.training.checkpoint import load_checkpoint, read_final

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


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: "-".join(trap))
def test_a_member_killed_while_fragments_overlap_stops_nobody(
    tiny_group: MakeGroup, trap: tuple[str, str, str]
) -> None:
    survive(tiny_group(heartbeat_timeout_s=40.0, **FRAGMENTED), trap)


@pytest.mark.parametrize("trap", [TRAPS[3], TRAPS[5], TRAPS[7]], ids=lambda trap: "-".join(trap))
def test_a_member_killed_while_several_rounds_are_open_stops_nobody(
    tiny_group: MakeGroup, trap: tuple[str, str, str]
) -> None:
    survive(tiny_group(heartbeat_timeout_s=40.0, **SEVERAL_OPEN), trap)


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
def test_whoever_is_slow_to_create_finds_it_done(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, record: str, changes: dict[str, Any]
) -> None:
    """Replica 0's create of round 2 leaves only when another's has arrived."""
    group = tiny_group(num_replicas=2, **changes)
    key = f"rounds/00000002/{record}"
    done = threading.Event()
    outcomes: list[bool] = []
    mortal = sys.modules[type(group).__module__].MortalStore
    create = mortal.create

    def slow(store: Any, wanted: str, data: Any) -> bool:
        if wanted == key and store._garbled == "slow":
            assert done.wait(60)
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
    """Lets a joiner's reads wait until the group has gone so many rounds further."""

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


def test_a_joiner_that_is_overtaken_by_sweeps_starts_again_from_a_newer_checkpoint(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its checkpoint is swept between manifest and weights, then the rounds it replays."""
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
    assert not pauses, "it was made to wait at each place"
    assert any(key.startswith("checkpoints/") for key in missing)
    assert any(key.endswith(".bin") for key in missing)


@pytest.mark.parametrize("changes", [{}, FRAGMENTED, SEVERAL_OPEN], ids=["one", "two", "open"])
def test_everyone_dead_and_resumed_is_the_log_replayed(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """I3 and I4: nothing is left but the store, and the bits at the end are the log's."""
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
    reducer = Reducer(group.store, settings, SystemClock())
    for commit in commits:
        slots = layout.table.slots_of(commit.fragment)
        merged = reducer.gather(group.plan(commit.round), slots, None, reducer.meter())
        outer.step(weights, merged.vector, layout.span(commit.fragment))
    layout.write(weights)
    assert torch.equal(resumed[0].weights(), _flat(layout))


def _flat(layout: Layout) -> torch.Tensor:
    """In the model's own order, as a member's weights are."""
    by_name = layout.split(layout.read())
    return torch.cat([by_name[tensor.name].flatten() for tensor in layout.tensors])
