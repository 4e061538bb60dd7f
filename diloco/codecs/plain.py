"""The element-wise codecs: fp32 and bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.codecs.base import check_body, check_vector, copy_as
from diloco.protocol.payload_size import payload_bytes


def _view(body: Tensor, dtype: torch.dtype) -> Tensor:
    """View ``body`` as ``dtype``; copies it first if its offset is not aligned."""
    return body.view(dtype) if _is_aligned(body, dtype) else copy_as(body, dtype)


def _is_aligned(body: Tensor, dtype: torch.dtype) -> bool:
    return not body.storage_offset() % dtype.itemsize and body.is_contiguous()


class Fp32:
    """The vector itself: body and vector share memory."""

    name = "fp32"
    chunk = 1

    def encoded_bytes(self, numel: int) -> int:
        return payload_bytes(numel, self.name)

    def encode(self, vector: Tensor, out: Tensor | None = None) -> Tensor:
        check_vector(vector)
        body = vector.detach().contiguous().view(torch.uint8)
        if out is None:
            return body
        check_body(out, size_bytes=body.numel())
        return out.copy_(body)

    def decode(self, body: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        check_body(body, size_bytes=self.encoded_bytes(numel))
        vector = _view(body, torch.float32)
        return vector if out is None else out.copy_(vector)


class Bf16:
    """Rounds to nearest even: half the bytes, 8 bits of significand.

    Magnitudes above 3.3961e38 round to infinity, as in IEEE 754.
    """

    name = "bf16"
    chunk = 1

    def encoded_bytes(self, numel: int) -> int:
        return payload_bytes(numel, self.name)

    def encode(self, vector: Tensor, out: Tensor | None = None) -> Tensor:
        check_vector(vector)
        if out is None:
            return vector.detach().to(torch.bfloat16).contiguous().view(torch.uint8)
        check_body(out, size_bytes=self.encoded_bytes(vector.numel()))
        if not _is_aligned(out, torch.bfloat16):
            return out.copy_(self.encode(vector))
        out.view(torch.bfloat16).copy_(vector.detach())
        return out

    def decode(self, body: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        check_body(body, size_bytes=self.encoded_bytes(numel))
        values = _view(body, torch.bfloat16)
        return values.to(torch.float32) if out is None else out.copy_(values)
