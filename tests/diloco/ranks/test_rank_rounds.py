"""Reductions of several ranks, which are threads here, have the bits of those of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from bench.support.cuts import small_cuts
from diloco.codecs import get_codec
from diloco.exchange import mean_reader
from diloco.exchange.mean_reader import DIGEST_BYTES, Chunks, joined_digest
from diloco.exchange.payload import PayloadInfo, PayloadWriter, digest_of, norms_of
from diloco.exchange.payload_reader import CannotReduce, Own
from diloco.exchange.reduce import Merged, Reduction
from diloco.exchange.timings import Timings
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import ContentDigest
from diloco.protocol import keys
from diloco.protocol.blocks import slice_spans
from diloco.protocol.parallel_reads import ExpectedReads
from diloco.protocol.records import Commit, Identity, Plan, PlannedContribution
from diloco.protocol.settings import GroupSettings
from diloco.ranks.jobs import JobWorker
from diloco.ranks.rank_exchange import RankTeam, RankWork
from diloco.ranks.rank_progress import RankProgress
from diloco.ranks.sliced_layout import SlicedLayout
from diloco.store.base import LocalStore, MakeParts, StoreError, StoreUnavailable
from diloco.store.metered import MeteredStore, StoreUsage
from tests.diloco.clocks import ManualClock
from tests.diloco.exchange.planned import planned
from tests.diloco.ranks.rank_threads import RankChannels, three_links

INCARNATION = "00001-00000000"
ME, *OTHERS = [Identity(replica=replica, incarnation=INCARNATION) for replica in range(3)]
UNIT = 8192
"""Elements of a unit of slices, two blocks."""


def model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(103, 103) for _ in range(4)])


LAYOUT = Layout(model())
NUMEL = LAYOUT.numel
SLOTS = LAYOUT.table.slots_of(0)


@pytest.fixture(autouse=True)
def small_units() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_cuts(part_bytes=8192))
        stack.enter_context(mock.patch("diloco.protocol.blocks.SLICE_UNIT", UNIT))
        stack.enter_context(mock.patch("diloco.ranks.rank_round.PART_BYTES", 8192))
        for module in ("model.outer_optimizer", "ranks.redistribute"):
            stack.enter_context(mock.patch(f"diloco.{module}.NORM_CHUNK", 1024))
        yield


class Stores(LocalStore):
    """The store of one rank: records what it reads, and can fail."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[tuple[str, int]] = []
        self.bytes_read = 0
        self.refused = ""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.read.append((key, start))
        self.bytes_read += length
        return super().get_range(key, start, length)

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        if self.refused and self.refused in key:
            raise StoreUnavailable("no connection")
        super().put_stream(key, make_parts, size_bytes=size_bytes)


class Replica:
    """Replica 0 as ``size`` ranks."""

    def __init__(self, root: Path, size: int, settings: GroupSettings) -> None:
        links = three_links(size)
        channels: list[Any] = [RankChannels(links, rank) for rank in range(size)]
        self.stores = [Stores(root) for _ in channels]
        self.progress = [
            RankProgress(ME, settings, SlicedLayout(model(), each.channel), ManualClock(), each)
            for each in channels
        ]
        self.works = works = [
            RankWork(progress, lambda store=store: store, settings, each.exchange, ManualClock())
            for progress, store, each in zip(self.progress, self.stores, channels, strict=True)
        ]
        metered = MeteredStore(self.stores[0])
        self.team = RankTeam(works[0], channels[0].exchange, metered, ME)
        self.workers = [
            JobWorker(work, each.exchange, StoreUsage)
            for work, each in zip(works[1:], channels[1:], strict=True)
        ]

    def contribute(self, info: PayloadInfo, vector: Tensor) -> PlannedContribution:
        for progress in self.progress:
            own = progress.layout.slice_of(0)
            opened: Any = SimpleNamespace(contributed=vector[own.start : own.stop])
            progress.opened[info.round] = opened
        parts = self.team.upload(info, vector, SLOTS)
        for store in self.stores:  # without the bytes that verify the upload
            store.read, store.bytes_read = [], 0
        squares = [square for part in parts for square in part.squares]
        return contribution(info, squares, "".join(p.checksums for p in parts), len(parts))

    def gathered(self, round: int) -> Tensor:
        return torch.cat([progress.reductions[round].merged for progress in self.progress])

    def end(self) -> None:
        self.team.end()
        for worker in self.workers:
            worker.join(600)


def contribution(
    info: PayloadInfo, squares: list[tuple[int, float]], checksums: str, slices: int
) -> PlannedContribution:
    return planned(
        Identity(replica=info.replica, incarnation=INCARNATION),
        weight=0.25 + 0.125 * info.replica,
        digest=digest_of(info, checksums),
        norms=norms_of(squares, len(SLOTS)),
        slices=slices,
    )


def contribute(
    store: LocalStore, info: PayloadInfo, vector: Tensor, settings: GroupSettings, slices: int
) -> PlannedContribution:
    squares, checksums = [], ""
    codec = get_codec(settings.codec, topk=settings.topk)
    for index, span in enumerate(slice_spans(NUMEL, slices)):
        part = vector[span.start : span.stop]
        writer = PayloadWriter(info, part, codec, SLOTS, clock=ManualClock(), span=span)
        key = keys.contribution_payload(info.round, info.replica, INCARNATION, index)
        store.put_stream(key, writer.parts)
        squares += writer.squares
        checksums += writer.checksums
    return contribution(info, squares, checksums, slices)


@dataclass
class Round:
    """A round of three replicas, of which replica 0 has several ranks, beside one process that does
    the same."""

    store: LocalStore
    settings: GroupSettings
    replica: Replica
    plan: Plan
    vector: Tensor
    commits: dict[int, Commit]

    def alone(self, *, own: bool = False) -> Reduction:
        digest = self.plan.contributions[0].digest
        return Reduction(
            self.store,
            self.settings,
            self.plan,
            SLOTS,
            timings=Timings(ManualClock()),
            commit_of=self.commits.get,
            own=Own(identity=ME, digest=digest, vector=self.vector) if own else None,
        )

    def ranks(self, *, own: bool = True) -> Reduction:
        digest, part = self.plan.contributions[0].digest, self.replica.progress[0].opened
        sent = Own(identity=ME, digest=digest, vector=part[self.plan.round].contributed)
        return self.replica.team.reduction(
            self.plan,
            SLOTS,
            timings=Timings(ManualClock()),
            commit_of=self.commits.get,
            own=sent if own else None,
        )

    def commit(self, digests: dict[int, str]) -> Commit:
        commit = Commit(
            round=self.plan.round,
            fragment=0,
            committer=ME,
            contributors=(ME, *OTHERS),
            shards=tuple(digests[shard] for shard in sorted(digests)),
            void="",
            tokens_total=1,
            committed_total=1,
            wall_s=0.0,
        )
        self.commits[commit.round] = commit
        self.store.create(keys.commit(commit.round), commit.to_bytes())
        return commit

    def has_bits(self, found: Merged, expected: Merged) -> bool:
        whole = self.replica.gathered(self.plan.round)
        is_own = torch.equal(found.vector, whole[: found.vector.numel()])
        same = (found.digest, found.present) == (expected.digest, expected.present)
        return is_own and same and torch.equal(whole, expected.vector)


def begin(
    root: Path,
    replica: Replica,
    settings: GroupSettings,
    mode: str,
    owners: tuple[int, ...],
    *,
    round: int = 1,
    commits: dict[int, Commit] | None = None,
) -> Round:
    store, contributions = LocalStore(root), []
    vectors = [
        torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * round + n))
        for n in range(3)
    ]
    for identity, vector in zip((ME, *OTHERS), vectors, strict=True):
        info = PayloadInfo(
            round=round, fragment=0, codec=settings.codec, numel=NUMEL, **vars(identity)
        )
        if identity == ME:
            contributions.append(replica.contribute(info, vector))
        else:
            slices = identity.replica
            contributions.append(contribute(store, info, vector, settings, slices))
    plan = Plan(
        round=round,
        fragment=0,
        mode=mode,
        planner=ME,
        contributions=tuple(contributions),
        owners=owners,
        wall_s=0.0,
    )
    return Round(store, settings, replica, plan, vectors[0], commits if commits is not None else {})


@contextlib.contextmanager
def ranks_of(root: Path, size: int, settings: GroupSettings) -> Iterator[Replica]:
    replica = Replica(root, size, settings)
    try:
        yield replica
    finally:
        replica.end()


def own_shards(owners: tuple[int, ...]) -> list[int]:
    return [shard for shard, owner in enumerate(owners) if owner == 0]


CASES = [
    pytest.param(3, {"codec": "bf16"}, (0, 1, 2), id="bf16"),
    pytest.param(4, {"codec": "fp32"}, (0, 1, 0, 1), id="fp32, two shards each"),
    pytest.param(2, {"codec": "topk"}, (1, 0), id="topk"),
    pytest.param(3, {"codec": "int8", "mean_codec": "e3m0"}, (0, 1), id="low-bit mean"),
    pytest.param(3, {"codec": "bf16", "merge": "rda"}, (2, 0), id="rda"),
    pytest.param(7, {"codec": "int8"}, (1,) * 9 + (0,) * 6, id="shards and ranks without elements"),
    pytest.param(3, {"codec": "int8", "mean_codec": "e3m0"}, (9,), id="syncer"),
]


@pytest.mark.parametrize(("size", "more", "owners"), CASES)
def test_a_stored_mean_has_the_bits_of_one_process(
    tmp_path: Path, size: int, more: dict[str, Any], owners: tuple[int, ...]
) -> None:
    settings = GroupSettings(**more)
    mode = "syncer" if owners == (9,) else "sharded"
    commits: dict[int, Commit] = {}
    with ranks_of(tmp_path, size, settings) as replica:
        for number in range(1, 3 if "mean_codec" in more else 2):
            round = begin(tmp_path, replica, settings, mode, owners, round=number, commits=commits)
            alone = round.alone(own=True)
            expected = alone.store_shards(range(len(owners)))
            whole = {key: round.store.get(key) for key in stored(round)}
            own = own_shards(owners)
            round.store.delete([key for key in whole if shard_of(key) in own])
            ranks = round.ranks()
            if own:
                assert ranks.store_shards(own) == {n: expected[n] for n in own}
            assert {key: round.store.get(key) for key in stored(round)} == whole
            commit = round.commit(expected)
            merged, one = ranks.committed(commit), alone.committed(commit)
            assert round.has_bits(merged, one)
            assert ranks.cosine(merged) == pytest.approx(alone.cosine(one), abs=1e-12)
            read = [key for store in replica.stores for key, _ in store.read]
            assert not any(shard_of(key) in own for key in read if number == 1)
            payload = keys.contribution_payload(number, 0, INCARNATION).removesuffix("bin")
            assert not any(key.startswith(payload) for key in read)


def stored(round: Round) -> list[str]:
    return [info.key for info in round.store.list(keys.reduced(round.plan.round))]


def shard_of(key: str) -> int | None:
    parsed = keys.parse_reduced_shard(key)
    return parsed[1] if parsed else None


def test_a_gathered_round_of_rda_has_the_bits_of_one_process(tmp_path: Path) -> None:
    settings = GroupSettings(codec="bf16", merge="rda")
    with ranks_of(tmp_path, 3, settings) as replica:
        round = begin(tmp_path, replica, settings, "gather", ())
        ranks, alone = round.ranks(), round.alone()
        assert round.has_bits(ranks.gather(), alone.gather())


def owned(root: Path, replica: Replica) -> tuple[Round, dict[int, str]]:
    """A round of four shards, of which one process has stored all."""
    round = begin(root, replica, GroupSettings(codec="bf16"), "sharded", (0, 1, 0, 1))
    return round, round.alone().store_shards(range(4))


def damage(store: LocalStore, key: str, position: int) -> None:
    data = bytearray(store.get(key))
    data[position] ^= 1
    store.put(key, bytes(data))


@pytest.mark.parametrize("hurt", ["damaged", "truncated", "missing"])
def test_a_mean_that_no_rank_can_read_is_reduced_from_the_payloads(
    tmp_path: Path, hurt: str
) -> None:
    with ranks_of(tmp_path, 3, GroupSettings(codec="bf16")) as replica:
        round, digests = owned(tmp_path, replica)
        commit = round.commit(digests)
        expected = round.alone().committed(commit)
        key = keys.reduced_shard(1, 3, digests[3])
        if hurt == "damaged":
            damage(round.store, key, -1)
        elif hurt == "truncated":
            round.store.put(key, round.store.get(key)[:-3])
        else:
            round.store.delete([key])
        assert round.has_bits(round.ranks().committed(commit), expected)


def test_a_shard_that_one_rank_reads_damaged_is_read_again(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 3, GroupSettings(codec="bf16")) as replica:
        round, digests = owned(tmp_path, replica)
        commit = round.commit(digests)
        last, read = replica.stores[2], LocalStore.get_range
        damaged: list[str] = []

        def get_range(key: str, start: int, length: int) -> bytes:
            data = read(last, key, start, length)
            if shard_of(key) == 3 and not damaged:
                damaged.append(key)
                data = bytes([data[0] ^ 1]) + data[1:]
            return data

        last.get_range = get_range  # type: ignore[method-assign]
        assert round.has_bits(round.ranks().committed(commit), round.alone().committed(commit))
        assert damaged


def test_shards_are_read_once_before_the_commit(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 3, GroupSettings(codec="bf16")) as replica:
        round, digests = owned(tmp_path, replica)
        ranks = round.ranks()
        listings = iter([{1: (digests[1],)}, {n: (digest,) for n, digest in digests.items()}])
        with mock.patch.object(mean_reader, "ExpectedReads", wraps=ExpectedReads) as expected:
            ranks.store_shards([0, 2], listed=lambda: next(listings))
        requests = [call.args[1] for call in expected.call_args_list]
        assert len(requests) == 3, "each rank reads ahead"
        assert {shard_of(key) for each in requests for key, _, _ in each} == {3}
        merged = ranks.committed(round.commit(digests))
        assert round.has_bits(merged, round.alone().committed(round.commits[1]))
        ranks.close()
        ranges = [where for store in replica.stores for where in store.read]
        assert len(ranges) == len(set(ranges))
        assert {shard_of(key) for key, _ in ranges if "reduced" in key} == {1, 3}


def test_chunks_of_a_shard_join_if_all_ranks_have_read_the_same_bytes() -> None:
    a, b, c = (bytes([n]) * DIGEST_BYTES for n in range(3))
    content = ContentDigest()
    content.update_chunks(a + b + c)
    joined = content.hexdigest()
    assert joined_digest([Chunks(1, b + c), Chunks(0, b""), Chunks(0, a + b)]) == joined
    assert joined_digest([Chunks(0, a + b), Chunks(1, a + c)]) == ""
    assert joined_digest([Chunks(0, a + b + c), Chunks(-1, b"")]) == ""


@pytest.mark.parametrize("refused", ["", "reduced/"])
def test_an_unreadable_payload_voids_all_own_shards(tmp_path: Path, refused: str) -> None:
    """A payload is damaged in a share of the second shard. The first one is stored, or not."""
    with ranks_of(tmp_path, 3, GroupSettings(codec="bf16")) as replica:
        round, _ = owned(tmp_path, replica)
        round.store.delete(stored(round))
        replica.stores[0].refused = refused
        damage(round.store, keys.contribution_payload(1, 1, INCARNATION), -20_000)
        ranks = round.ranks()
        with pytest.raises(CannotReduce, match="payload of replica 1: expected checksum"):
            ranks.store_shards([0, 2])
        assert len(stored(round)) == (0 if refused else 1)


def test_a_shard_that_cannot_be_stored_is_an_error_of_the_store(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 3, GroupSettings(codec="bf16")) as replica:
        round, _ = owned(tmp_path, replica)
        replica.stores[1].refused = "reduced/"
        with pytest.raises(StoreError, match="rank 1: no connection"):
            round.ranks().store_shards([0, 2])


def test_each_rank_reads_its_share_of_the_payloads_and_its_slice_of_the_mean(
    tmp_path: Path,
) -> None:
    with ranks_of(tmp_path, 3, GroupSettings(codec="bf16")) as replica:
        round = begin(tmp_path, replica, GroupSettings(codec="bf16"), "sharded", (0, 1, 2))
        alone = Stores(tmp_path)
        one = replace(round, store=alone).alone(own=True)
        digests = round.alone().store_shards(range(3))
        commit = round.commit(digests)
        one.store_shards([0])
        one.committed(commit)
        ranks = round.ranks()
        ranks.store_shards([0])
        ranks.committed(commit)
        whole, parts = alone.bytes_read, [store.bytes_read for store in replica.stores]
        assert whole <= sum(parts) < 1.25 * whole
        assert max(parts) < 0.5 * whole


def test_a_rank_without_a_store_leaves_no_other_rank_waiting(tmp_path: Path) -> None:
    def refused() -> LocalStore:
        raise StoreUnavailable("no credentials")

    with ranks_of(tmp_path, 3, GroupSettings(codec="bf16")) as replica:
        round, _ = owned(tmp_path, replica)
        replica.works[1]._store, replica.works[1]._open_store = None, refused
        with pytest.raises(StoreError, match="rank 1: no credentials"):
            round.ranks().store_shards([0, 2])
