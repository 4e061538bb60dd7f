"""The element-wise codecs: fp32 and bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.codecs.base import check_body, check_vector, copy_as
from diloco.protocol.payload_size import payload_bytes


def _view(body: Tensor, dtype: torch.dtype) -> Tensor:
    """``body`` as ``dtype``; copied first if it does not start where such a tensor may."""
    if body.storage_offset() % dtype.itemsize or not body.is_contiguous():
        return copy_as(body, dtype)
    return body.view(dtype)


class Fp32:
    """The vector itself: body and vector share their memory."""

    name = "fp32"
    chunk = 1

    def encoded_bytes(self, numel: int) -> int:
        return payload_bytes(numel, self.name)

    def encode(self, vector: Tensor) -> Tensor:
        check_vector(vector)
        return vector.detach().contiguous().view(torch.uint8)

    def decode(self, body: Tensor, numel: int) -> Tensor:
        check_body(body, size_bytes=self.encoded_bytes(numel))
        return _view(body, torch.float32)


class Bf16:
    """Round to nearest even; half the bytes, 8 bits of significand.

    Magnitudes above 3.3961e38 round to infinity, as IEEE 754 has it.
    """

    name = "bf16"
    chunk = 1

    def encoded_bytes(self, numel: int) -> int:
        return payload_bytes(numel, self.name)

    def encode(self, vector: Tensor) -> Tensor:
        check_vector(vector)
        return vector.detach().to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, body: Tensor, numel: int) -> Tensor:
        check_body(body, size_bytes=self.encoded_bytes(numel))
        return _view(body, torch.bfloat16).to(torch.float32)
