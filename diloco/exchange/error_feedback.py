"""Error feedback: the values that a lossy codec omitted are added to the next contribution.

With g the fragment's pseudo-gradient and e its residual, a replica contributes ``u = g + decay*e``
and, once a round includes it, keeps ``e = u - decode(encode(u))`` (SparseLoCo, arXiv:2508.15706). A
round without the contribution leaves the residual unchanged: it is work that an earlier round has
included, while the late progress is in the local weights as far as it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from diloco.codecs import get_codec
from diloco.protocol.blocks import block_elements
from diloco.protocol.payload_size import CODEC_SHAPES
from diloco.protocol.settings import GroupSettings


class ErrorFeedback:
    """One residual per fragment, (n,) fp32 on the CPU; None if there is none.

    Inactive unless the codec is sparse and ``error_feedback`` is above 0.
    """

    def __init__(self, settings: GroupSettings, *, fragments: int) -> None:
        self.active = CODEC_SHAPES[settings.codec].is_sparse and settings.error_feedback > 0
        self._decay = settings.error_feedback
        self._codec = get_codec(settings.codec, topk=settings.topk)
        self.of: list[Tensor | None] = [None] * fragments

    @torch.no_grad()
    def added_to(self, gradient: Tensor, fragment: int) -> Tensor:
        """Return ``u``: a new vector if there is a residual, otherwise ``gradient`` itself."""
        residual = self.of[fragment]
        return gradient if residual is None else residual.mul(self._decay).add_(gradient)

    def taken(self, contributed: Tensor, fragment: int) -> None:
        """Update the residual after a round included ``contributed``, u, which is modified in
        place."""
        if self.active:
            self.of[fragment] = self.left_out(contributed)

    @torch.no_grad()
    def left_out(self, contributed: Tensor) -> Tensor | None:
        """Replace ``contributed``, u, by the values that encoding omits, in place; None without
        error feedback."""
        if not self.active:
            return None
        block = block_elements(contributed.numel())
        for start in range(0, contributed.numel(), block):
            piece = contributed[start : start + block]
            piece.sub_(self._codec.decode(self._codec.encode(piece), piece.numel()))
        return contributed

    def restore(self, saved: Mapping[int, Tensor]) -> None:
        """Load the residuals that an earlier process saved."""
        if self.active:
            for fragment, residual in saved.items():
                if fragment < len(self.of):
                    self.of[fragment] = residual

    def drop(self) -> None:
        """Drop all residuals."""
        self.of = [None] * len(self.of)
