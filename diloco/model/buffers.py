"""Buffers of a model that training changes, such as the running statistics of BatchNorm.

They have no gradient, so each replica has its own values, and what they mean for the group is for
the caller to decide: average them with the weights, or leave each replica its own. Only persistent
buffers of a floating-point type count; others are caches and counters.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from diloco.model.named_parameters import bare, bare_name, first_names, is_sharded, local
from diloco.model.outer_optimizer import content_digest
from diloco.protocol.payload_size import CODEC_SHAPES, FULL_MEAN, LOW_BIT_CODECS

Buffers = Literal["average", "local"]
"""average: buffers are part of the group's weights and become the average of the replicas in each
round: of its contributors, with weights that sum to one. local: each replica keeps its own, and the
final weights have those of their publisher."""


def exchangeable(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return (name, buffer) of the persistent floating-point buffers in the model's order."""
    model = bare(model)
    kept = model.state_dict().keys()
    return [
        (bare_name(name), buffer)
        for name, buffer in model.named_buffers()
        if name in kept and buffer.is_floating_point()
    ]


class BufferCheck:
    """Checks that no buffer changes in a way that the caller has not decided about."""

    def __init__(
        self, model: nn.Module, choice: Buffers | None, *, codec: str, mean_codec: str = FULL_MEAN
    ) -> None:
        """Raises :class:`ValueError` for another choice, and if it is not possible here."""
        if choice not in ("average", "local", None):
            raise ValueError(f"buffers: expected 'average' or 'local', found {choice!r}")
        self._model = model
        buffers = exchangeable(model)
        self._held = {name: buffer for name, buffer in buffers if choice == "average"}
        self._digests = {name: tensor_digest(buffer) for name, buffer in buffers if choice is None}
        sharded = [name for name in self._held if is_sharded(self._held[name])]
        if sharded:
            raise ValueError(
                f"buffers: expected unsharded buffers to average, found {first_names(sharded)} as "
                "DTensor. Enter buffers='local'"
            )
        if self._held and CODEC_SHAPES[codec].is_sparse:
            raise ValueError(
                f"buffers: expected another codec than {codec} to average buffers, because it "
                "omits most values. Enter buffers='local', or create the group with another codec"
            )
        for name, value in (("codec", codec), ("mean_codec", mean_codec)):
            if self._held and value in LOW_BIT_CODECS:
                raise ValueError(
                    f"buffers: expected another {name} than {value} to average buffers, because "
                    "its rounding can make a small running variance negative. Enter "
                    f"buffers='local', or create the group with another {name}"
                )

    def check(self) -> None:
        """Raise :class:`ValueError` if training has changed a buffer without a choice, or replaced
        an averaged one by another tensor."""
        if not (self._held or self._digests):
            return
        now = dict(exchangeable(self._model))
        replaced = [name for name, held in self._held.items() if now.get(name) is not held]
        if replaced:
            raise ValueError(
                "buffers: expected averaged buffers to be changed in place, found other tensors "
                f"for {first_names(replaced)}. Use copy_ on the buffer, or enter buffers='local'"
            )
        changed = [
            name
            for name, before in self._digests.items()
            if name in now and tensor_digest(now[name]) != before
        ]
        if changed:
            raise ValueError(
                f"buffers: expected no change of the model's buffers, found {len(changed)} that "
                f"training has changed: {first_names(changed)}. They have no gradient, so each "
                "replica has other values. Enter buffers='average' in join on all replicas to "
                "average them with the weights in each round, or buffers='local' to leave each "
                "replica its own"
            )


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of the bytes of a tensor, or of the part of it that this rank holds."""
    data = local(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
    return content_digest(memoryview(data.numpy()))  # type: ignore[arg-type]
