"""Payloads and codecs: what is packed comes back, and damage of any kind is found."""

from __future__ import annotations

import pytest
import torch

from diloco.codecs import get_codec
from diloco.wire import BLOCK_BYTES, BadPayload, Payload, PayloadInfo, pack, unpack


def info(numel: int, codec: str = "fp32") -> PayloadInfo:
    return PayloadInfo(
        round=1, fragment=0, replica=2, incarnation="00001-00000000", codec=codec, numel=numel
    )


def packed(vector: torch.Tensor, codec: str = "fp32") -> Payload:
    return pack(info(vector.numel(), codec), get_codec(codec).encode(vector))


@pytest.mark.parametrize("numel", [0, 1, 7, 1000, BLOCK_BYTES // 4 + 3])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_a_vector_comes_back(numel: int, codec: str) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    payload = packed(vector, codec)
    body = unpack(payload.data, info(numel, codec), digest=payload.digest)
    decoded = get_codec(codec).decode(body, numel)
    expected = vector if codec == "fp32" else vector.bfloat16().float()
    assert torch.equal(decoded, expected)
    assert body.numel() == get_codec(codec).encoded_bytes(numel)


def test_every_flipped_byte_is_found() -> None:
    payload = packed(torch.arange(40.0))
    for position in range(len(payload.data)):
        damaged = bytearray(payload.data)
        damaged[position] ^= 0x10
        with pytest.raises(BadPayload):
            unpack(damaged, info(40), digest=payload.digest)


def test_every_truncation_is_found() -> None:
    payload = packed(torch.arange(40.0))
    for length in range(len(payload.data)):
        with pytest.raises(BadPayload):
            unpack(bytes(payload.data[:length]), info(40), digest=payload.digest)


def test_another_replicas_payload_is_refused_with_expected_and_found() -> None:
    payload = packed(torch.arange(40.0))
    with pytest.raises(BadPayload, match="expected numel 41, found 40"):
        unpack(payload.data, info(41), digest=payload.digest)
    with pytest.raises(BadPayload, match="expected digest"):
        unpack(payload.data, info(40), digest="0" * 64)


def test_bf16_loses_at_most_half_a_unit_in_the_last_place() -> None:
    vector = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    codec = get_codec("bf16")
    error = (codec.decode(codec.encode(vector), 10_000) - vector).abs() / vector.abs()
    assert error.max() <= 2**-8


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ValueError, match="found 'zip'"):
        get_codec("zip")
