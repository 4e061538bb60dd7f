"""The trained parameters of a model, independent of wrappers and sharding.

Names are those of the bare model: prefixes and infixes of DistributedDataParallel, torch.compile
and activation checkpointing are removed, so that replicas of one group can use different wrappers.
A parameter that FSDP2 (``fully_shard``) has sharded is a DTensor; it is read and written as a full
tensor, one parameter at a time.

Not supported: FSDP1 (``FullyShardedDataParallel``), whose flat shards have no separate names, and
tensor parallelism that divides the same dimension as FSDP2 (strided shards).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diloco.model.host_copies import copy_from_host

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor.placement_types import Placement

log = logging.getLogger(__name__)

_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Name components that torch.compile, activation checkpointing and FSDP1 add."""


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def bare_name(name: str) -> str:
    """Return a parameter's name without the components that wrappers of inner modules add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) of the trained parameters in the model's order; a tied parameter
    appears once.

    Raises :class:`ValueError` for a model without any, and for FSDP1.
    """
    model = bare(model)
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "expected a model sharded by torch.distributed.fsdp.fully_shard, "
                "found one wrapped in FullyShardedDataParallel"
            )
    named = [(bare_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("expected a model with trainable parameters, found none")
    return named


def check_optimizers(model: nn.Module, optimizers: Iterable[object]) -> None:
    """Raise :class:`ValueError` for optimizers without any trained parameter: those of another
    model, or created before the parameters were replaced (for example by FSDP)."""
    named = trained(model)
    missing = dict(named)
    for optimizer in optimizers:
        groups = getattr(optimizer, "param_groups", None)
        if not groups:
            return
        held = {id(parameter) for group in groups for parameter in group["params"]}
        own = [name for name, parameter in named if id(parameter) in held]
        if not own:
            raise ValueError(
                f"inner_optimizer: expected the parameters of the joining model, found none of its "
                f"{len(named)} (the first is {named[0][0]}). Create the optimizer from "
                "model.parameters() after the model is wrapped or moved"
            )
        for name in own:
            missing.pop(name, None)
    if missing:
        log.warning(
            "%d trained parameters are in no inner optimizer and will not change here: %s",
            len(missing),
            first_names(list(missing)),
        )


def check_trained(model: nn.Module, names: frozenset[str]) -> None:
    """Raise :class:`ValueError` unless the trained parameters are those of the join.

    New ones would never be exchanged. Frozen ones would still be changed by the outer momentum.
    """
    now = [name for name, _ in trained(model)]
    if new := [name for name in now if name not in names]:
        raise ValueError(
            f"expected the {len(names)} parameters that were trained when the model joined, found "
            f"{len(new)} more: {first_names(new)}. Set requires_grad and add parameters before "
            "join; a group trains the same parameters to its end"
        )
    if frozen := sorted(names.difference(now)):
        raise ValueError(
            f"expected the {len(names)} parameters that were trained when the model joined, found "
            f"{len(frozen)} without requires_grad: {first_names(frozen)}. The group still changes "
            "them. Set requires_grad before each call of step, or freeze them before join on all "
            "replicas"
        )


def first_names(names: list[str]) -> str:
    """Return the first three names as a text."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def is_sharded(parameter: Tensor) -> bool:
    """Return whether each rank holds a part of the parameter, so that reading it is a collective
    operation."""
    tensor = sys.modules.get("torch.distributed.tensor")  # a DTensor exists only if it is imported
    return tensor is not None and isinstance(parameter, tensor.DTensor)


def check_placements(model: nn.Module) -> None:
    """Raise :class:`ValueError` for a sharded parameter that can't be read and written whole.

    Supported are DTensors on any mesh whose placements are ``Shard`` and ``Replicate``: FSDP2, HSDP
    and tensor parallelism on another dimension than FSDP2.
    """
    tensor = sys.modules.get("torch.distributed.tensor")
    for name, parameter in model.named_parameters():
        if tensor is None or not is_sharded(parameter):
            continue
        placements: Any = parameter
        for placement in placements.placements:
            if type(placement) not in (tensor.Shard, tensor.Replicate):
                mesh = placements.device_mesh.mesh_dim_names or placements.device_mesh.ndim
                raise ValueError(
                    f"expected parameters with the placements Shard and Replicate, found "
                    f"{placement!r} of {bare_name(name)} on the mesh {mesh}: tensor parallelism "
                    "and fully_shard divide the same dimension of this parameter, which a replica "
                    "of several ranks does not support. Use fully_shard alone, or let tensor "
                    "parallelism divide another dimension"
                )


def sharding_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules whose parameters FSDP2 replaces by full ones while they compute."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def read(parameter: Tensor) -> Tensor:
    """Return the full parameter, detached, with its shape, dtype and device.

    Shares memory with an unsharded parameter. For a sharded one it is a collective operation of all
    its ranks.
    """
    if is_sharded(parameter):
        sharded: Any = parameter.detach()
        full: Tensor = sharded.full_tensor()
        return full
    return parameter.detach()


def local(parameter: Tensor) -> Tensor:
    """Return the part of a parameter that this rank holds, detached, in the parameter's memory."""
    if is_sharded(parameter):
        sharded: Any = parameter.detach()
        part: Tensor = sharded.to_local()
        return part
    return parameter.detach()


@torch.no_grad()
def write(parameter: Tensor, full: Tensor) -> None:
    """Set a parameter in place from the full tensor (its shape, any dtype and device).

    Each rank of a sharded parameter takes its part without communication.
    """
    if not is_sharded(parameter):
        copy_from_host(parameter, full)
        return
    held: Any = parameter
    copy_from_host(held.to_local(), own_part(full, held.device_mesh, held.placements))


def own_part(full: Tensor, mesh: DeviceMesh, placements: Iterable[Placement]) -> Tensor:
    """Return a view of the part of a tensor that this rank holds, on the tensor's device.

    ``distribute_tensor`` gives the same part, but moves the whole tensor to the mesh's device.
    Raises :class:`ValueError` for placements other than ``Shard`` and ``Replicate``.
    """
    from torch.distributed.tensor import Replicate, Shard

    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank holds a part of the parameter"
    part = full
    for dimension, (placement, rank) in enumerate(zip(placements, coordinate, strict=True)):
        if type(placement) is Shard:
            parts = part.chunk(mesh.size(dimension), placement.dim)
            part = parts[rank] if rank < len(parts) else part.narrow(placement.dim, 0, 0)
        elif type(placement) is not Replicate:
            raise ValueError(f"expected the placements Shard and Replicate, found {placement!r}")
    return part


def state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (bare name, full tensor) of the model's state dict one at a time, tied tensors once.

    For sharded tensors it is a collective operation: all their ranks must exhaust it.
    """
    for name, tensor in unread_state(model):
        yield name, read(tensor)


def unread_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Like :func:`state`, with sharded tensors as they are."""
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
        yield bare_name(name), tensor.detach()
