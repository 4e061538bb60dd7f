"""A low-bit mean: the rounding error of one round enters the next one of the fragment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.support.cuts import small_cuts
from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.exchange.payload import PayloadInfo, PayloadWriter
from diloco.exchange.reduce import CannotReduce, Reduction
from diloco.exchange.timings import Timings
from diloco.model.fragments import Slot
from diloco.protocol import keys
from diloco.protocol.records import Commit, Identity, Plan
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore
from tests.diloco.exchange.planned import planned

NUMEL = 50_003
"""Thirteen blocks of 4,096 elements: unequal shards, and a last block of 851."""
SLOTS = (Slot(name="a", shape=(NUMEL,), dtype="float32", numel=NUMEL),)
INCARNATION = "00001-00000000"
ME = Identity(replica=0, incarnation=INCARNATION)
EXACT = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def several_blocks() -> Iterator[None]:
    with small_cuts(part_bytes=16_384):
        yield


@dataclass
class Log:
    """Rounds of one fp32 contribution, :data:`EXACT`, so that the exact mean is known."""

    store: LocalStore
    fragments: int = 1
    mean_codec: str = "e3m0"
    commits: dict[int, Commit] = field(default_factory=dict)

    def plan(self, round: int, shards: int) -> Plan:
        """Upload the payload; return the plan, gathered if ``shards`` is 0."""
        info = PayloadInfo(
            round=round, fragment=0, replica=0, incarnation=INCARNATION, codec="fp32", numel=NUMEL
        )
        packing = PayloadWriter(info, EXACT, get_codec("fp32"), SLOTS, clock=SystemClock())
        self.store.put_stream(keys.contribution_payload(round, 0, INCARNATION), packing.parts)
        contribution = planned(
            ME,
            weight=1.0,
            size_bytes=packing.size_bytes,
            digest=packing.digest,
        )
        return Plan(
            round=round,
            fragment=0,
            mode="sharded" if shards else "gather",
            planner=ME,
            contributions=(contribution,),
            owners=tuple(range(shards)),
            wall_s=0.0,
        )

    def reduction(self, plan: Plan) -> Reduction:
        """Return the reduction of a process without state."""
        settings = GroupSettings(
            mean_codec=self.mean_codec, num_fragments=self.fragments, sync_every=60
        )
        return Reduction(
            self.store,
            settings,
            plan,
            SLOTS,
            timings=Timings(SystemClock()),
            commit_of=self.commits.get,
        )

    def round(self, round: int, shards: int) -> Tensor:
        """Reduce and commit a round, each shard by another process; return the applied mean."""
        plan = self.plan(round, shards)
        if not shards:
            merged = self.reduction(plan).gather()
            self.commit(round, merged_digest=merged.digest)
            return merged.vector
        digests = tuple(
            self.reduction(plan).store_shards([shard])[shard] for shard in range(shards)
        )
        self.commit(round, shards=digests)
        return self.reduction(plan).committed(self.commits[round]).vector

    def commit(
        self, round: int, *, shards: tuple[str, ...] = (), merged_digest: str = "", void: str = ""
    ) -> None:
        self.commits[round] = Commit(
            round=round,
            fragment=0,
            committer=ME,
            contributors=(ME,),
            merged_digest=merged_digest,
            shards=shards,
            void=void,
            tokens_total=0,
            committed_total=0,
            wall_s=0.0,
        )

    def objects(self, round: int) -> list[Path]:
        return sorted((self.store.root / keys.reduced(round)).iterdir())


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(LocalStore(tmp_path))


def relative(error: Tensor) -> float:
    return float(error.norm() / EXACT.norm())


@pytest.mark.parametrize(("mean_codec", "lost"), [("e3m0", 0.02), ("int8", 0.0005)])
def test_what_one_mean_cuts_off_enters_the_next(log: Log, mean_codec: str, lost: float) -> None:
    """The sum of the applied means stays within one rounding error of the exact sum."""
    log.mean_codec = mean_codec
    applied = torch.zeros(NUMEL)
    errors = []
    for round in range(1, 13):
        applied += log.round(round, shards=3)
        errors.append(relative(applied - round * EXACT))
    first = relative(
        get_codec(mean_codec).decode(get_codec(mean_codec).encode(EXACT), NUMEL) - EXACT
    )
    assert errors[0] == pytest.approx(first, rel=1e-4)
    assert max(errors) < 1.5 * first
    # A gathered round applies the rest; only the rounding of the residuals themselves is lost.
    assert relative(applied + log.round(13, shards=0) - 13 * EXACT) < lost


def test_the_bits_do_not_depend_on_the_shards(tmp_path: Path) -> None:
    """Owners change, and with them the boundaries of the shards."""
    counts = [(1, 1, 1, 0), (3, 5, 2, 0), (20, 1, 13, 0)]
    means = []
    for index, shards in enumerate(counts):
        log = Log(LocalStore(tmp_path / str(index)))
        means.append([log.round(round, count) for round, count in enumerate(shards, start=1)])
    for other in means[1:]:
        assert all(map(torch.equal, means[0], other))


def test_a_lost_shard_is_reduced_again_with_its_residual(log: Log) -> None:
    log.round(1, shards=3)
    expected = log.round(2, shards=3)
    log.objects(2)[1].unlink()
    again = log.reduction(log.plan(2, shards=3)).committed(log.commits[2])
    assert torch.equal(again.vector, expected)


def test_residuals_belong_to_fragments(log: Log) -> None:
    """With two fragments, round 3 continues round 1."""
    log.fragments = 2
    first = log.round(1, shards=2)
    log.commit(2, void="another fragment")
    assert relative(first + log.round(3, shards=0) - 2 * EXACT) < 0.02


def test_a_void_round_keeps_the_residual(log: Log) -> None:
    first = log.round(1, shards=2)
    log.commit(2, void="payload of replica 0")
    assert relative(first + log.round(3, shards=0) - 2 * EXACT) < 0.02


def damage_tail(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [damage_tail, Path.unlink])
@pytest.mark.parametrize("shards", [0, 2])
def test_an_unreadable_residual_voids_three_rounds_and_is_dropped(
    log: Log, harm: object, shards: int
) -> None:
    log.round(1, shards=2)
    harm(log.objects(1)[0])  # type: ignore[operator]
    for round in (2, 3, 4):
        with pytest.raises(CannotReduce, match=r"residual in"):
            log.round(round, shards)
        log.commit(round, void="reduced shard: residual")
    assert relative(log.round(5, shards=0) - EXACT) == 0


def test_a_round_after_an_unknown_one_is_not_reduced(log: Log) -> None:
    """Otherwise a process that lags behind would reduce without the residual."""
    log.round(1, shards=2)
    log.commits.clear()
    with pytest.raises(CannotReduce, match="expected the commit of round 1, found none"):
        log.round(2, shards=2)
