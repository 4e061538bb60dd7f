"""Codecs: a flat fp32 vector to bytes and back.

A codec quantises what travels; sums are always taken in fp32 after decoding. ``fp32`` and
``bf16`` are element-wise, so a slice of the body decodes to the same slice of the vector.
"""

from __future__ import annotations

import sys
from typing import Protocol

import torch
from torch import Tensor

from diloco.rendezvous.cost import payload_bytes

assert sys.byteorder == "little", "payloads are little-endian and read without conversion"


class Codec(Protocol):
    name: str

    def encoded_bytes(self, numel: int) -> int:
        """Size of the body for a vector of ``numel`` elements, bytes."""
        ...

    def encode(self, vector: Tensor) -> Tensor:
        """Body of a 1-d fp32 vector as a 1-d uint8 tensor on the same device. The vector is left
        unchanged, but the body may share its memory."""
        ...

    def decode(self, body: Tensor) -> Tensor:
        """The fp32 vector of a 1-d uint8 body; it may share the body's memory."""
        ...


class _Fp32:
    name = "fp32"

    def encoded_bytes(self, numel: int) -> int:
        return payload_bytes(numel, self.name)

    def encode(self, vector: Tensor) -> Tensor:
        return vector.contiguous().view(torch.uint8)

    def decode(self, body: Tensor) -> Tensor:
        return body.view(torch.float32)


class _Bf16:
    """Round to nearest even; half the bytes, 8 bits of significand."""

    name = "bf16"

    def encoded_bytes(self, numel: int) -> int:
        return payload_bytes(numel, self.name)

    def encode(self, vector: Tensor) -> Tensor:
        return vector.to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, body: Tensor) -> Tensor:
        return body.view(torch.bfloat16).to(torch.float32)


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (_Fp32(), _Bf16())}


def get_codec(name: str) -> Codec:
    """The codec of that name; :class:`ValueError` for an unknown one."""
    try:
        return _CODECS[name]
    except KeyError:
        raise ValueError(f"expected a codec of {', '.join(_CODECS)}, found {name!r}") from None
