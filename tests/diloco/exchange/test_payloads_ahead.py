"""Which payloads are read before there is a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.exchange.checked_blocks import CheckedBlocks
from diloco.exchange.payload import PayloadInfo
from diloco.exchange.payload_reader import Own
from diloco.exchange.payloads_ahead import read_ahead
from diloco.exchange.timings import Timings
from diloco.protocol import keys
from diloco.protocol.blocks import HEADER_BYTES, SLICE_UNIT, shard_spans
from diloco.protocol.parallel_reads import Range
from diloco.protocol.records import Identity, Plan
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore
from tests.diloco.exchange.planned import planned

INCARNATION = "00001-00000000"
ME = Identity(replica=0, incarnation=INCARNATION)
NUMEL = 3 * SLICE_UNIT


def ahead(
    root: Path, *, contributors: int, slices: int = 1, mode: str, owners: int = 0
) -> list[Range] | None:
    """Return what replica 0 reads ahead in round 2, as the plan of round 1 lets it expect."""
    last = Plan(
        round=1,
        fragment=0,
        mode=mode,
        planner=ME,
        contributions=tuple(
            planned(
                Identity(replica=replica, incarnation=INCARNATION),
                weight=1 / contributors,
                digest=str(replica),
                slices=slices,
            )
            for replica in range(contributors)
        ),
        owners=(*range(contributors),) * owners,
        wall_s=0.0,
    )
    info = PayloadInfo(
        round=2, fragment=0, replica=0, incarnation=INCARNATION, codec="fp32", numel=NUMEL
    )
    own = Own(identity=ME, digest="new", vector=torch.empty(0))
    timings = Timings(SystemClock())
    reads = read_ahead(LocalStore(root), GroupSettings(), last, info, own, timings=timings)
    if reads is None:
        return None
    reads.close()
    return reads._requests


@pytest.mark.parametrize(
    ("contributors", "slices", "is_read"),
    [(2, 1, True), (8, 1, True), (9, 1, False), (3, 3, True), (4, 3, False)],
)
def test_at_most_eight_objects_are_looked_for(
    tmp_path: Path, contributors: int, slices: int, is_read: bool
) -> None:
    found = ahead(tmp_path, contributors=contributors, slices=slices, mode="gather")
    assert (found is not None) == is_read


def test_an_owner_reads_the_payloads_for_all_its_shards(tmp_path: Path) -> None:
    found = ahead(tmp_path, contributors=2, mode="sharded", owners=2)
    first, second = (shard_spans(NUMEL, 4)[shard] for shard in (0, 2))
    key = keys.contribution_payload(2, 1, INCARNATION)
    body = CheckedBlocks(get_codec("fp32"), NUMEL)
    assert found == [
        (key, HEADER_BYTES + body.size_bytes(span.start), body.size_bytes(span.numel))
        for span in (first, second)
    ]
