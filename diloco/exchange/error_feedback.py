"""Error feedback: what a lossy codec left out is added to the next contribution.

With g the fragment's pseudo-gradient and e its residual, a replica contributes ``u = g + decay*e``
and, once the round has taken it, keeps ``e = u - decode(encode(u))`` (SparseLoCo,
arXiv:2508.15706). A round that missed the contribution leaves the residual as it was, because the
progress is still in the local weights; where those were overwritten, all of u is left out:
``e = u``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from diloco.codecs import get_codec
from diloco.protocol.blocks import block_elements
from diloco.protocol.settings import GroupSettings


class Residuals:
    """One residual per fragment, (n,) fp32 on the CPU; None where there is nothing left out.

    Does nothing unless the codec is ``topk`` and ``error_feedback`` is above 0.
    """

    def __init__(self, settings: GroupSettings, *, fragments: int) -> None:
        self.active = settings.codec == "topk" and settings.error_feedback > 0
        self._decay = settings.error_feedback
        self._codec = get_codec(settings.codec, topk=settings.topk)
        self.of: list[Tensor | None] = [None] * fragments

    @torch.no_grad()
    def added_to(self, gradient: Tensor, fragment: int) -> Tensor:
        """``u``: a new vector where there is a residual, else ``gradient`` itself."""
        residual = self.of[fragment]
        return gradient if residual is None else residual.mul(self._decay).add_(gradient)

    def taken(self, contributed: Tensor, fragment: int) -> None:
        """The round took ``contributed``, u, which is used up."""
        if self.active:
            self.of[fragment] = self.left_out(contributed)

    @torch.no_grad()
    def left_out(self, contributed: Tensor) -> Tensor | None:
        """What is left out of ``contributed``, u, in its place; None without error feedback."""
        if not self.active:
            return None
        block = block_elements(contributed.numel())
        for start in range(0, contributed.numel(), block):
            piece = contributed[start : start + block]
            piece.sub_(self._codec.decode(self._codec.encode(piece), piece.numel()))
        return contributed

    def overwritten(self, contributed: Tensor, fragment: int) -> None:
        """The round missed it, and the local progress is gone."""
        if self.active:
            self.of[fragment] = contributed

    def restore(self, saved: Mapping[int, Tensor]) -> None:
        """Take up what an earlier process saved."""
        if self.active:
            for fragment, residual in saved.items():
                if fragment < len(self.of):
                    self.of[fragment] = residual

    def drop(self) -> None:
        self.of = [None] * len(self.of)
