"""The saved state of several ranks, which are threads here, has the tensors of one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.errors import ReplicaError
from diloco.model import tensor_file
from diloco.model.inner_state import BY_NAME
from diloco.model.state_tree import split_tree
from diloco.model.tensor_file import TensorWriter, in_order
from diloco.protocol import keys, object_digest, pieces
from diloco.protocol.settings import GroupSettings
from diloco.ranks import state_share
from diloco.ranks.collective_ops import Operation, SharedInner
from diloco.ranks.state_share import SavedShares, SharedTensor, StateShare, copied, fitted
from diloco.training import stored_objects
from diloco.training.replica_state import (
    EarlyContribution,
    ReplicaState,
    StateWriter,
    load_replica_state,
)
from diloco.training.stored_objects import put_tensors
from tests.diloco.ranks.rank_threads import (
    ME,
    Channel,
    Links,
    RankChannels,
    Ranks,
    three_links,
)

PART = 2**18
RANKS = 3


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tensor_file, object_digest, pieces, state_share, stored_objects):
        monkeypatch.setattr(module, "PART_BYTES", PART)


def described(tensors: dict[str, Tensor], *, leaders: str = "") -> list[SharedTensor]:
    return [
        SharedTensor(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            is_leaders=name == leaders,
        )
        for name, tensor in in_order(tensors).items()
    ]


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("numel", [1, 70_000, 300_000])
def test_the_shares_of_all_ranks_are_the_object_of_one_process(ranks: int, numel: int) -> None:
    tensors = {
        "moment": torch.randn(numel),
        "step": torch.tensor(3.0),
        "mask": torch.tensor([True, False]),
        "position": torch.arange(9),
    }
    links = Links(ranks)

    def share(rank: int) -> bytes:
        own = dict(tensors)
        if rank:
            del own["position"]  # an object of the caller, on the leader
        channel: Any = Channel(links, rank)
        return b"".join(copied(described(tensors, leaders="position"), own, channel).parts())

    with ThreadPoolExecutor(ranks) as pool:
        shares = list(pool.map(share, range(ranks)))
    assert b"".join(shares) == b"".join(TensorWriter(tensors).parts())
    stops = [*accumulate(map(len, shares))]
    assert all(stop % PART == 0 or stop == stops[-1] for stop in stops)
    assert max(map(len, shares)) - min(map(len, shares)) <= 2 * PART


class Saved:
    """A state with a tensor of the optimizer, and residuals of two fragments of three ranks."""

    def __init__(self, root: Path) -> None:
        self.ranks = Ranks(root, RANKS, GroupSettings(num_fragments=2))
        layout = self.ranks.layouts[0]
        self.moment = torch.randn(300_000)
        self.whole = [torch.randn(layout.span(n).numel) for n in range(2)]
        self.early = torch.randn(layout.span(1).numel)

    def write(self, *, is_earlier: bool = False) -> None:
        """Write the state from all ranks, with an early contribution of this process, or of an
        earlier one of the replica."""
        early = []
        for work in self.ranks.works:
            early.append(self.slice(work, self.early, 1))
            work.progress.held = {"residual.0": self.slice(work, self.whole[0], 0)}
            if is_earlier:
                contribution = EarlyContribution(incarnation="00001-00000001", residual=early[-1])
                work.progress.early = {4: contribution}
            else:
                work.progress.held["left_out.4"] = early[-1]
        leader = self.ranks.works[0]
        state = ReplicaState(
            round=3,
            tokens=7,
            trees={
                BY_NAME: {"state": {"w": {"moment": self.moment}}, "groups": [{"lr": 0.5}]},
                "counter": {"position": torch.arange(5)},
            },
            residuals={0: leader.progress.held["residual.0"]},
            early={4: EarlyContribution(incarnation="00001-00000001", residual=early[0])},
        )
        for work in self.ranks.works:
            work.inner.own = {"0": self.moment}
        with ThreadPoolExecutor(RANKS) as pool:
            following = [pool.submit(work.follow_copy) for work in self.ranks.works[1:]]
            writer = self.ranks.storage.state_writer(state)
            writer.copy()
            for each in following:
                each.result(timeout=60)
        self.moment_then = self.moment.clone()
        self.moment.zero_()  # the next inner step
        manifest = writer.write(self.ranks.store, ME, wall_s=0.0)
        assert manifest.tensors.pieces and manifest.residuals and manifest.residuals.pieces

    def slice(self, work: Any, whole: Tensor, fragment: int) -> Tensor:
        own = work.layout.slice_of(fragment)
        return whole[own.start : own.stop].clone()


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Saved]:
    made = Saved(tmp_path)
    yield made
    made.ranks.end()


@pytest.mark.parametrize("is_earlier", [False, True])
def test_one_process_reads_the_state_of_several_ranks(saved: Saved, is_earlier: bool) -> None:
    saved.write(is_earlier=is_earlier)
    state = load_replica_state(saved.ranks.store, 0)
    assert state is not None and (state.round, state.tokens) == (3, 7)
    optimizer = state.trees[BY_NAME]
    assert optimizer["groups"] == [{"lr": 0.5}]
    assert torch.equal(optimizer["state"]["w"]["moment"], saved.moment_then)
    assert state.trees["counter"]["position"].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(state.residuals[0], saved.whole[0]) and [*state.residuals] == [0]
    early = state.early[4].residual
    assert early is not None and torch.equal(early, saved.early)


def test_each_rank_reads_its_slices_of_the_residuals(saved: Saved) -> None:
    saved.write()
    state = load_replica_state(saved.ranks.store, 0, saved.ranks.storage)
    assert state is not None
    check_slices(saved, state)
    assert state.trees["counter"]["position"].tolist() == [0, 1, 2, 3, 4]


def test_each_rank_reads_a_share_of_the_optimizer_state(saved: Saved) -> None:
    saved.write()
    assert load_replica_state(saved.ranks.store, 0, saved.ranks.storage)

    def loaded(rank: int) -> Tensor:
        shares = saved.ranks.works[rank].inner.saved
        assert shares is not None
        own = {"state": {"w": {"moment": torch.ones(300_000)}}, "groups": [{"lr": 7.0}]}
        targets: dict[str, Tensor] = {}
        tree = fitted(shares, shares.skeleton, own, targets)
        assert tree["groups"] == [{"lr": 0.5}] and [*targets] == ["0"]
        return shares.take("0", saved.ranks.channels[rank].channel)

    with ThreadPoolExecutor(RANKS) as pool:
        for moment in pool.map(loaded, range(RANKS)):
            assert torch.equal(moment, saved.moment_then)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"w": {"moment": torch.ones(3)}},
            r"expected a saved tensor of \[3\], found one of \[300000\]",
        ),
        ({"w": {"other": torch.ones(3)}}, r"not \['moment', 'other'\]"),
        ({"w": [torch.ones(3)]}, "expected list, found a saved dict"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(saved: Saved, own: Any, message: str) -> None:
    saved.write()
    assert load_replica_state(saved.ranks.store, 0, saved.ranks.storage)
    shares = saved.ranks.works[1].inner.saved
    assert shares is not None
    with pytest.raises(ValueError, match=message):
        fitted(shares, shares.skeleton, {"state": own, "groups": [{"lr": 7.0}]}, {})


def test_ranks_read_the_state_of_one_process(saved: Saved) -> None:
    whole = ReplicaState(
        round=3,
        tokens=7,
        trees={"inner_optimizer": {"moment": saved.moment}, "counter": {"n": torch.ones(2)}},
        residuals={0: saved.whole[0]},
        early={4: EarlyContribution(incarnation="00001-00000001", residual=saved.early)},
    )
    StateWriter(whole).write(saved.ranks.store, ME, wall_s=0.0)
    state = load_replica_state(saved.ranks.store, 0, saved.ranks.storage)
    assert state is not None and state.trees["counter"]["n"].tolist() == [1, 1]
    assert all(work.inner.saved is None for work in saved.ranks.works), "it has another form"
    check_slices(saved, state)


def check_slices(saved: Saved, state: ReplicaState) -> None:
    leader = saved.ranks.works[0]
    assert torch.equal(state.residuals[0], saved.slice(leader, saved.whole[0], 0))
    for work in saved.ranks.works:
        held = work.progress.held
        assert torch.equal(held["residual.0"], saved.slice(work, saved.whole[0], 0))
        assert torch.equal(held["left_out.4"], saved.slice(work, saved.early, 1))


def test_a_residual_of_another_model_is_not_used(saved: Saved) -> None:
    other = ReplicaState(
        round=3, tokens=7, trees={}, residuals={0: torch.ones(5), 9: torch.ones(5)}
    )
    StateWriter(other).write(saved.ranks.store, ME, wall_s=0.0)
    state = load_replica_state(saved.ranks.store, 0, saved.ranks.storage)
    assert state is not None and not state.residuals


@pytest.mark.parametrize("name", ["residual.00", "residual.+1", "left_out.04"])
def test_a_residual_has_one_name(saved: Saved, name: str) -> None:
    """The leader sends numbers, from which the others make the names of their slices."""
    other = ReplicaState(round=3, tokens=7, trees={}, residuals={})
    manifest = StateWriter(other).write(saved.ranks.store, ME, wall_s=0.0)
    stored = put_tensors(saved.ranks.store, manifest.tensors.key, {name: saved.whole[0]})
    odd = replace(manifest, tensors=stored)
    key = keys.replica_state_manifest(ME.replica, ME.incarnation, 3)
    saved.ranks.store.put(key, odd.to_bytes())
    state = load_replica_state(saved.ranks.store, 0, saved.ranks.storage)
    assert state is not None and not state.residuals
    assert all(not work.progress.held for work in saved.ranks.works)


def test_a_tree_that_names_a_residual_is_refused(saved: Saved) -> None:
    other = ReplicaState(round=3, tokens=7, trees={"inner_optimizer": {"a": 1}}, residuals={})
    manifest = StateWriter(other).write(saved.ranks.store, ME, wall_s=0.0)
    tree = {"dict": [["inner_optimizer", {"tensor": "residual.0"}]]}
    odd = replace(manifest, tree=tree)
    key = keys.replica_state_manifest(ME.replica, ME.incarnation, 3)
    saved.ranks.store.put(key, odd.to_bytes())
    assert load_replica_state(saved.ranks.store, 0, saved.ranks.storage) is None


def test_a_copy_whose_job_failed_is_freed_by_the_next_one(saved: Saved) -> None:
    work = saved.ranks.works[0]
    first, second = (StateShare(start=0, sizes=(1,), memory=torch.empty(1)) for _ in range(2))
    work._shares = {1: first, 2: second}
    assert work._share(2) is second and not work._shares


class Counter:
    """An object of the caller. It refuses saved counts above ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit, self.count = limit, 0

    def state_dict(self) -> Any:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        if state["count"] > self.limit:
            raise IndexError("too high")
        self.count = state["count"]


@pytest.mark.parametrize(
    ("trees", "limits", "error"),
    [
        ({"counter": {"count": 3}}, (9, 9), ""),
        ({"counter": {"count": 3}}, (1, 1), "ValueError: IndexError: too high"),
        ({"counter": 3}, (9, 9), "ValueError: TypeError: 'int' object is not subscriptable"),
        ({"counter": {True: 3}}, (9, 9), "TypeError: state.counter: expected keys of str or int"),
        (
            {"counter": {"count": 3}},
            (9, 1),
            "ReplicaError: expected all ranks to restore the saved state, found on rank 1: "
            "IndexError: too high",
        ),
        (
            {"counter": {"count": 3}, "inner_optimizer": {}},
            (9, 9),
            "ValueError: expected the inner optimizer of several ranks, found that of one process",
        ),
    ],
)
def test_an_object_that_refuses_the_saved_state_ends_no_rank(
    trees: dict[str, Any], limits: tuple[int, int], error: str
) -> None:
    """As in a replica of one process, which goes on from the global weights."""
    links = three_links(2)
    counters = [Counter(limit) for limit in limits]
    inners = []
    for rank, counter in enumerate(counters):
        ranks: Any = RankChannels(links, rank)
        inners.append(SharedInner([], {"counter": counter}, ranks))
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(inners[1].follow, Operation.LOAD)
        raised = ""
        try:
            inners[0].load(trees)
        except (TypeError, ValueError, ReplicaError) as found:
            raised = f"{type(found).__name__}: {found}"
        assert raised.startswith(error) and bool(raised) == bool(error)
        if raised.startswith("TypeError"):
            inners[0].load({})  # nothing was sent before
        if raised.startswith("ReplicaError"):
            with pytest.raises(ReplicaError, match="too high"):
                following.result(timeout=60)
        else:
            following.result(timeout=60)
    if not error:
        assert [counter.count for counter in counters] == [3, 3]


def test_an_optimizer_that_refuses_the_saved_state_ends_no_rank() -> None:
    links, inners = three_links(2), []
    for rank in range(2):
        ranks: Any = RankChannels(links, rank)
        ranks.model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(ranks.model.parameters(), lr=0.5)
        inner = SharedInner([optimizer], None, ranks)
        skeleton, tensors = split_tree(inner.save()[BY_NAME] | {"param_groups": 5})
        assert not tensors
        inner.saved = SavedShares(skeleton, 1, ranks.storage)
        inners.append(inner)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(inners[1].follow, Operation.LOAD)
        with pytest.raises(ValueError, match="TypeError"):
            inners[0].load({BY_NAME: {}})
        following.result(timeout=60)
