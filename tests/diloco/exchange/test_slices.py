"""Payloads that the ranks of a replica write in slices, and reductions of a slice."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.clock import SystemClock
from diloco.codecs import Codec, get_codec
from diloco.exchange.cosine import cosine_of
from diloco.exchange.payload import PayloadInfo, PayloadWriter, digest_of, norms_of
from diloco.exchange.payload_reader import CannotReduce, Own
from diloco.exchange.reduce import Reduction
from diloco.exchange.timings import Timings
from diloco.exchange.upload import upload
from diloco.model.fragments import Slot
from diloco.model.outer_optimizer import ContentDigest, chunk_digests, vector_bytes
from diloco.protocol import keys
from diloco.protocol.blocks import SLICE_UNIT, Span, slice_count, slice_spans
from diloco.protocol.payload_size import CODEC_SHAPES
from diloco.protocol.records import Identity, Plan, PlannedContribution
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore
from tests.diloco.exchange.planned import planned
from tests.matrix import matrix

INCARNATION = "00001-00000000"
FIRST = 300_001
NUMEL = 2 * SLICE_UNIT + 100_003
SLOTS = (
    Slot(name="a", shape=(FIRST,), dtype="float32", numel=FIRST, offset=7),
    Slot(name="b", shape=(NUMEL - FIRST,), dtype="float32", numel=NUMEL - FIRST, offset=7 + FIRST),
)


def vector(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def contribute(
    store: LocalStore, replica: int, values: Tensor, codec: Codec, slices: int
) -> tuple[PlannedContribution, list[PayloadWriter]]:
    """Upload a payload as ``slices`` ranks do."""
    info = PayloadInfo(
        round=1, fragment=0, replica=replica, incarnation=INCARNATION, codec=codec.name, numel=NUMEL
    )
    written = []
    for index, span in enumerate(slice_spans(NUMEL, slices)):

        def make(span: Span = span) -> PayloadWriter:
            part = values[span.start : span.stop]
            return PayloadWriter(info, part, codec, SLOTS, clock=SystemClock(), span=span)

        key = keys.contribution_payload(1, replica, INCARNATION, index)
        packing, verify = upload(store, key, make, codec, verify_bytes=2**30)
        assert verify() == ""
        written.append(packing)
    checksums = "".join(packing.checksums for packing in written)
    contribution = planned(
        Identity(replica=replica, incarnation=INCARNATION),
        weight=0.25 * (replica + 1),
        size_bytes=sum(packing.size_bytes for packing in written),
        digest=digest_of(info, checksums),
        slices=slices,
    )
    return contribution, written


def test_slices_are_whole_units_and_cover_a_fragment() -> None:
    assert [slice_count(numel, 4) for numel in (1, SLICE_UNIT, SLICE_UNIT + 1, 2**30)] == [
        1,
        1,
        2,
        4,
    ]
    for numel in (1, SLICE_UNIT, NUMEL, 2**30 + 1):
        count = slice_count(numel, 4)
        spans = slice_spans(numel, count)
        assert spans[0].start == 0 and spans[-1].stop == numel
        assert all(a.stop == b.start for a, b in pairwise(spans))
        assert all(span.start % SLICE_UNIT == 0 and span.numel > 0 for span in spans)
        padded = [span for span in slice_spans(numel, 4) if span.numel]
        assert padded == spans, "ranks without a slice do not change those of the others"


@pytest.mark.parametrize("codec", CODEC_SHAPES)
def test_a_payload_in_slices_has_the_bytes_and_the_record_of_a_whole_one(
    tmp_path: Path, codec: str
) -> None:
    coder = get_codec(codec, topk=64)
    whole, sliced = LocalStore(tmp_path / "whole"), LocalStore(tmp_path / "sliced")
    expected, (one,) = contribute(whole, 0, vector(0), coder, 1)
    found, parts = contribute(sliced, 0, vector(0), coder, 3)
    assert replace(found, slices=1) == expected
    assert norms_of([s for part in parts for s in part.squares], 2) == one.norms
    joined = b"".join(
        sliced.get(keys.contribution_payload(1, 0, INCARNATION, index)) for index in range(3)
    )
    assert joined == whole.get(keys.contribution_payload(1, 0, INCARNATION))


@matrix("codec", CODEC_SHAPES, fast=("fp32", "int8"))
def test_slices_of_a_reduction_have_the_bits_of_a_whole_one(tmp_path: Path, codec: str) -> None:
    settings = GroupSettings(codec=codec, topk=64)
    coder = get_codec(codec, topk=64)
    store = LocalStore(tmp_path)
    contributions = [
        contribute(store, replica, vector(replica), coder, slices)[0]
        for replica, slices in enumerate((1, 2, 3))
    ]
    plan = Plan(
        round=1,
        fragment=0,
        mode="gather",
        planner=Identity(replica=0, incarnation=INCARNATION),
        contributions=tuple(contributions),
        wall_s=0.0,
    )

    def reduction(span: Span | None) -> Reduction:
        own = Own(
            identity=Identity(replica=1, incarnation=INCARNATION),
            digest=contributions[1].digest,
            vector=vector(1)[span.start : span.stop] if span else vector(1),
            start=span.start if span else 0,
        )
        timings = Timings(SystemClock())
        return Reduction(store, settings, plan, SLOTS, timings=timings, own=own, span=span)

    whole = reduction(None)
    merged = whole.gather()
    for ranks in (2, 3):
        parts = [reduction(span) for span in slice_spans(NUMEL, ranks)]
        vectors = [part.gather_span() for part in parts]
        assert torch.equal(torch.cat(vectors), merged.vector)
        content = ContentDigest()
        for part in vectors:
            content.update_chunks(chunk_digests(vector_bytes(part)))
        assert content.hexdigest() == merged.digest
        products = [part.products(v) for part, v in zip(parts, vectors, strict=True)]
        assert cosine_of(products) == pytest.approx(whole.cosine(merged), abs=1e-12)


@pytest.mark.parametrize("slices", [0, -1, 4, 10**12])
def test_an_impossible_number_of_slices_cannot_be_reduced(tmp_path: Path, slices: int) -> None:
    store = LocalStore(tmp_path)
    planned, _ = contribute(store, 0, vector(0), get_codec("bf16"), 1)
    values: dict[str, Any] = {"mode": "gather", "wall_s": 0.0, "round": 1, "fragment": 0}
    plan = Plan(
        planner=Identity(replica=0, incarnation=INCARNATION),
        contributions=(replace(planned, slices=slices),),
        **values,
    )
    timings = Timings(SystemClock())
    reduction = Reduction(store, GroupSettings(), plan, SLOTS, timings=timings)
    with pytest.raises(CannotReduce, match=f"found {slices} slices"):
        reduction.gather()
