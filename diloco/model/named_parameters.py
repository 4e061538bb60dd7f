"""The trained parameters of a model, whatever it is wrapped in and however it is sharded.

Names are the bare model's: what DistributedDataParallel, torch.compile and activation
checkpointing put in front or in between is taken away, so that replicas of one group may each be
wrapped in their own way. A parameter that FSDP2 (``fully_shard``) has cut over several ranks is a
DTensor; it is read whole and written from the whole, one parameter at a time.

What it leaves out: FSDP1 (``FullyShardedDataParallel``), whose flat shards have no names of their
own, and tensor parallelism inside FSDP2 (strided shards).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

log = logging.getLogger(__name__)

_INSIDE = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""What torch.compile, activation checkpointing and FSDP1 put into the names of what they wrap."""


def bare(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def bare_name(name: str) -> str:
    """A parameter's name without what wrappers of inner modules add to it."""
    return ".".join(part for part in name.split(".") if part not in _INSIDE)


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of what is trained, in the model's own order; a tied one appears once.

    Raises :class:`ValueError` for a model without any, or sharded by FSDP1.
    """
    model = bare(model)
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "expected a model sharded by torch.distributed.fsdp.fully_shard, "
                "found one wrapped in FullyShardedDataParallel"
            )
    found = [(bare_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    if not found:
        raise ValueError("expected a model with trainable parameters, found none")
    return found


def check_optimizer(model: nn.Module, optimizer: object) -> None:
    """Raise :class:`ValueError` for an optimizer that holds none of the trained parameters: that of
    another model, or made before the parameters were replaced (moved to FSDP, for example)."""
    groups = getattr(optimizer, "param_groups", None)
    if not groups:
        return
    held = {id(parameter) for group in groups for parameter in group["params"]}
    named = trained(model)
    missing = [name for name, parameter in named if id(parameter) not in held]
    if len(missing) == len(named):
        raise ValueError(
            f"inner_optimizer: expected the parameters of the model that joins, found none of its "
            f"{len(named)} (the first is {missing[0]}). Make the optimizer from model.parameters() "
            "after the model is wrapped or moved"
        )
    if missing:
        log.warning(
            "%d trained parameters are not in the inner optimizer and will not change here: %s",
            len(missing), _first(missing),
        )  # fmt: skip


def warn_of_buffers(model: nn.Module) -> None:
    """Log the buffers that training changes: each replica keeps its own."""
    model = bare(model)
    kept = model.state_dict().keys()
    found = [
        bare_name(name)
        for name, buffer in model.named_buffers()
        if name in kept and buffer.is_floating_point()
    ]
    if found:
        log.warning(
            "buffers are never exchanged, each replica keeps its own (%d, such as %s): running "
            "statistics of BatchNorm differ between replicas, and the final weights have those of "
            "the replica that publishes them",
            len(found), _first(found),
        )  # fmt: skip


def check_trained(model: nn.Module, names: frozenset[str]) -> None:
    """Raise :class:`ValueError` if parameters are trained that were frozen, or not there, when the
    model joined: they would never be exchanged."""
    new = [name for name, _ in trained(model) if name not in names]
    if new:
        raise ValueError(
            f"expected the {len(names)} parameters that were trained when the model joined, found "
            f"{len(new)} more: {_first(new)}. Set requires_grad and add parameters before join; a "
            "group trains the same parameters to its end"
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def is_sharded(parameter: Tensor) -> bool:
    """Whether each rank holds a part of it, so that reading it is a collective operation."""
    tensor = sys.modules.get("torch.distributed.tensor")  # nobody has made a DTensor without it
    return tensor is not None and isinstance(parameter, tensor.DTensor)


def sharding_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters FSDP2 swaps for whole ones while they compute."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def read(parameter: Tensor) -> Tensor:
    """The whole parameter, of its own shape, dtype and device; detached.

    Shares memory where it is not sharded. Where it is, a collective of all its ranks.
    """
    if is_sharded(parameter):
        sharded: Any = parameter.detach()
        whole: Tensor = sharded.full_tensor()
        return whole
    return parameter.detach()


@torch.no_grad()
def write(parameter: Tensor, whole: Tensor) -> None:
    """Set a parameter in place from the whole (its shape, any dtype and device).

    Where it is sharded, each rank takes its part, without communication.
    """
    if not is_sharded(parameter):
        parameter.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    held: Any = parameter
    mine = distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)
    held.to_local().copy_(mine.to_local())


def state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(bare name, whole tensor) of the model's state dict, each tied one once, one at a time.

    Where tensors are sharded, a collective of all their ranks, which must all exhaust it.
    """
    model = bare(model)
    tensors = model.state_dict()
    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    held: set[int] = set()
    tied: set[str] = set()
    for name, tensor in named:
        if id(tensor) in held:
            tied.add(name)
        held.add(id(tensor))
    pointers: set[int] = set()
    for name, tensor in tensors.items():
        if name in tied:
            continue
        if not is_sharded(tensor):
            if tensor.numel() and tensor.data_ptr() in pointers:
                continue
            pointers.add(tensor.data_ptr())
        yield bare_name(name), read(tensor)
