"""Payloads: encoding and decoding part by part, and detection of damage."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.exchange.checked_blocks import BadPayload
from diloco.exchange.payload import (
    PayloadInfo,
    PayloadWriter,
    blocks_of,
    digest_of,
    header,
)
from diloco.exchange.reduce import Own
from diloco.model.fragments import Slot, Table
from diloco.model.outer_optimizer import fast_sum_of_squares, sum_of_squares
from diloco.protocol import blocks
from diloco.protocol.blocks import HEADER_BYTES, Span
from diloco.protocol.payload_size import CODEC_SHAPES, checked_bytes
from diloco.protocol.records import Identity

BLOCK = blocks.SMALLEST_BLOCK


def info(numel: int, codec: str = "fp32") -> PayloadInfo:
    return PayloadInfo(
        round=1, fragment=0, replica=2, incarnation="00001-00000000", codec=codec, numel=numel
    )


def slots(*numels: int) -> tuple[Slot, ...]:
    result = [
        Slot(name=f"t{i}", shape=(n,), dtype="float32", numel=n) for i, n in enumerate(numels)
    ]
    return Table(result, fragments=1, pattern="size").slots


def pack(vector: torch.Tensor, codec: str = "fp32") -> tuple[bytes, PayloadWriter]:
    packing = PayloadWriter(
        info(vector.numel(), codec),
        vector,
        get_codec(codec),
        slots(vector.numel()),
        clock=SystemClock(),
    )
    return b"".join(packing.parts()), packing


@pytest.mark.parametrize("numel", [0, 1, 7, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("codec", list(CODEC_SHAPES))
def test_a_vector_round_trips(numel: int, codec: str) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    data, packing = pack(vector, codec)
    engine = get_codec(codec)
    body_bytes = checked_bytes(numel, codec, block=BLOCK)
    assert len(data) == packing.size_bytes == HEADER_BYTES + body_bytes
    result = packing.blocks.decode(data[HEADER_BYTES:], Span(0, numel))
    assert torch.equal(result, engine.decode(engine.encode(vector), numel))
    assert packing.norm == pytest.approx(float(result.double().norm()), rel=1e-12)


@pytest.mark.parametrize("codec", list(CODEC_SHAPES))
def test_any_range_of_blocks_can_be_decoded_separately(codec: str) -> None:
    vector = torch.randn(3 * BLOCK + 5, generator=torch.Generator().manual_seed(1))
    data, packing = pack(vector, codec)
    engine = get_codec(codec)
    whole = engine.decode(engine.encode(vector), vector.numel())
    for span in (Span(BLOCK, 2 * BLOCK), Span(2 * BLOCK, 3 * BLOCK + 5), Span(0, 2 * BLOCK)):
        blocks = packing.blocks
        start = HEADER_BYTES + blocks.size_bytes(span.start)
        result = blocks.decode(data[start : start + blocks.size_bytes(span.numel)], span)
        assert torch.equal(result, whole[span.start : span.stop])


def test_the_parts_of_an_upload_do_not_share_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diloco.exchange.payload.PART_BYTES", 100_000)
    vector = torch.arange(2.0 * BLOCK)
    packing = PayloadWriter(
        info(vector.numel()), vector, get_codec("fp32"), slots(BLOCK, BLOCK), clock=SystemClock()
    )
    parts = list(packing.parts())
    assert {len(part) for part in parts[:-1]} == {100_000} and len(parts[-1]) <= 100_000
    block_bytes = packing.blocks.size_bytes(BLOCK)
    stored = [b"".join(parts)[HEADER_BYTES:][start:][: 4 * BLOCK] for start in (0, block_bytes)]
    assert b"".join(stored) == vector.numpy().tobytes()
    assert packing.norms == pytest.approx(
        [float(half.double().norm()) for half in vector.split(BLOCK)]
    )
    first = packing.digest
    assert b"".join(packing.parts()) == b"".join(parts), "it can be made again for another try"
    assert packing.digest == first


@pytest.mark.parametrize("codec", list(CODEC_SHAPES))
def test_only_a_small_payload_is_kept_and_decodes_equally(codec: str) -> None:
    engine, numel = get_codec(codec, topk=64), 3 * BLOCK + 777
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    packing = PayloadWriter(info(numel, codec), vector, engine, slots(numel), clock=SystemClock())
    for _ in range(2):  # a second attempt yields the same parts
        data = b"".join(packing.parts())
    assert (packing.body is not None) == (codec in ("e3m0", "topk"))
    who = Identity(replica=0, incarnation="00001-00000000")
    encoded = Own(identity=who, digest="", vector=vector)
    kept = Own(identity=who, digest="", vector=vector, body=packing.body)
    if packing.body is not None:
        stored = packing.blocks.decode(data[HEADER_BYTES:], Span(0, numel))
        assert torch.equal(engine.decode(packing.body, numel), stored)
    for span in (Span(0, numel), Span(BLOCK, 3 * BLOCK), Span(2 * BLOCK, numel)):
        assert torch.equal(kept.decoded(span, engine), encoded.decoded(span, engine))


def test_every_flipped_byte_is_detected() -> None:
    data, packing = pack(torch.arange(40.0))
    for position in range(HEADER_BYTES, len(data)):
        damaged = bytearray(data[HEADER_BYTES:])
        damaged[position - HEADER_BYTES] ^= 0x10
        with pytest.raises(BadPayload, match=r"expected checksum .* of block 0"):
            packing.blocks.decode(damaged, Span(0, 40))


def test_a_block_of_another_payload_or_place_is_detected() -> None:
    """A process that contributes to a round again, or a read at a wrong offset, cannot make
    replicas sum other bytes than those of the plan."""
    vector = torch.zeros(2 * BLOCK)
    data, packing = pack(vector)
    again = replace(info(2 * BLOCK), attempt=2)
    size_bytes = packing.blocks.size_bytes(BLOCK)
    first, second = data[HEADER_BYTES:][:size_bytes], data[HEADER_BYTES:][size_bytes:]
    whole = Span(0, 2 * BLOCK)
    assert torch.equal(packing.blocks.decode(first + second, whole), vector)
    with pytest.raises(BadPayload, match="of block 0"):
        packing.blocks.decode(second + first, whole)
    with pytest.raises(BadPayload, match="of block 0"):
        blocks_of(again, get_codec("fp32")).decode(first + second, whole)


def test_every_truncation_is_detected() -> None:
    data, packing = pack(torch.arange(40.0))
    for length in range(len(data) - HEADER_BYTES):
        with pytest.raises(BadPayload, match=f"expected 168 bytes .*, found {length}"):
            packing.blocks.decode(data[HEADER_BYTES : HEADER_BYTES + length], Span(0, 40))


def test_the_digest_covers_identity_round_and_content() -> None:
    data, packing = pack(torch.arange(40.0))
    assert data[:HEADER_BYTES] == header(info(40))
    assert packing.digest == digest_of(info(40), packing.checksums)
    others = {digest_of(info(41), packing.checksums), digest_of(info(40), "00000000")}
    assert packing.digest not in others and len(others) == 2


def test_bf16_loses_at_most_half_a_unit_in_the_last_place() -> None:
    vector = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    codec = get_codec("bf16")
    error = (codec.decode(codec.encode(vector), 10_000) - vector).abs() / vector.abs()
    assert error.max() <= 2**-8


def test_the_error_names_an_unknown_codec() -> None:
    with pytest.raises(ValueError, match="found 'zip'"):
        get_codec("zip")


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-25, 1e-3, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("numel", [0, 1, 5000, 2**17 + 3])
def test_fast_norms_are_as_large_as_exact_ones(numel: int, scale: float) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * scale
    assert fast_sum_of_squares(vector) == pytest.approx(sum_of_squares(vector), rel=1e-5, abs=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_fast_norms_show_values_that_are_not_finite(value: float) -> None:
    assert not math.isfinite(fast_sum_of_squares(torch.tensor([1.0, value])))
