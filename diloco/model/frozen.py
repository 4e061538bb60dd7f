"""Frozen parameters: those of a base model beside the adapters that are trained.

Replicas do not exchange them, so all replicas must have loaded the same ones: a mean of adapters to
different base models fits none of them. In a group with the setting ``frozen`` *local* only their
names, shapes and dtypes are equal.
"""

from __future__ import annotations

from torch import Tensor, nn

from diloco.model.buffers import tensor_digest
from diloco.model.named_parameters import bare, bare_name, read
from diloco.protocol.records import FrozenEntry


def frozen_parameters(model: nn.Module, *, digests: bool = True) -> tuple[FrozenEntry, ...]:
    """Return the parameters without gradients in the model's order.

    With ``digests`` those of their values, too: it reads all of them, and for sharded ones it is a
    collective operation of all ranks.
    """
    return tuple(
        FrozenEntry(
            name=bare_name(name),
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            digest=_digest(parameter) if digests else "",
        )
        for name, parameter in bare(model).named_parameters()
        if not parameter.requires_grad
    )


def _digest(parameter: Tensor) -> str:
    """Return the digest of the values; '' for a parameter whose values are offloaded."""
    return "" if parameter.is_meta else tensor_digest(read(parameter))
