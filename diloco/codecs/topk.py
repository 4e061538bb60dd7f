"""Top-k: the largest values of every chunk of 4096 (SparseLoCo, arXiv:2508.15706).

A chunk is one fp32 scale, k uint16 indices in ascending order, then k int8 values as in
:class:`diloco.codecs.blocks.Int8`. Eight bits are enough: their error is negligible next to the
dropped values, except for very heavy tails, where it adds one per cent; a larger k reduces the
error more than the bytes of bf16 would (``bench/codec_error.py``). Top-k alone is biased: use it
with error feedback.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.codecs.base import ALIGNMENT, ChunkedCodec, copy_as
from diloco.codecs.blocks import SCALE_BYTES, get_scale, put_scale, quantise
from diloco.protocol.payload_size import payload_bytes

INDEX_BITS = 12
assert 2**INDEX_BITS == ALIGNMENT


class TopK(ChunkedCodec):
    """Keeps the ``topk`` largest magnitudes of each chunk, of equal ones the first; a last chunk
    with fewer values is kept whole."""

    name = "topk"

    def __init__(self, topk: int) -> None:
        super().__init__()
        if not 1 <= topk <= self.chunk:
            raise ValueError(f"expected topk from 1 to {self.chunk}, found {topk}")
        self.topk = topk

    def encoded_bytes(self, numel: int) -> int:
        return payload_bytes(numel, self.name, topk=self.topk)

    def encode_rows(self, rows: Tensor, out: Tensor) -> None:
        kept = min(self.topk, rows.shape[1])
        # Unique keys make the selection independent of the library: magnitude first (fp32 bits
        # order as integers), then the earlier index. NaN is the largest.
        magnitude = rows.abs().view(torch.int32)
        keys = magnitude.to(torch.int64)
        keys <<= INDEX_BITS
        keys |= torch.arange(ALIGNMENT - 1, ALIGNMENT - 1 - rows.shape[1], -1, device=rows.device)
        indices = keys.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
        values = rows.gather(1, indices)
        end = SCALE_BYTES + 2 * kept
        put_scale(quantise(values, out[:, end:].view(torch.int8)), out)
        out[:, SCALE_BYTES:end] = indices.to(torch.int16).view(torch.uint8)

    def decode_rows(self, body: Tensor, out: Tensor) -> None:
        kept = min(self.topk, out.shape[1])
        end = SCALE_BYTES + 2 * kept
        indices = copy_as(body[:, SCALE_BYTES:end], torch.int16).to(torch.int64)
        # A repeated index would make the result nondeterministic.
        is_ascending = bool((indices[:, 1:] > indices[:, :-1]).all())
        if not is_ascending or int(indices.min()) < 0 or int(indices.max()) >= out.shape[1]:
            raise ValueError(
                f"expected ascending indices below {out.shape[1]} in every chunk, found others"
            )
        values = body[:, end:].view(torch.int8).to(torch.float32)
        values *= get_scale(body)
        out.zero_().scatter_(1, indices, values)
