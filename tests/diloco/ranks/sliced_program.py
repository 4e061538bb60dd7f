"""One process of the tests of sliced replicas; see ``test_sliced_replicas.py``.

    python sliced_program.py ROOT RANKS RANK SCENARIO ...

The process is rank RANK of a replica of RANKS ranks; with RANKS = 0 it is replica 1, alone. A step
changes every element by a function of itself, so that all wrappers and any number of ranks train
the same local weights. Parts, units of slices and chunks of digests have a sixteenth of their size,
and so has the model; a payload is encoded in steps of such a unit.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from diloco.store import base

base.PART_BYTES //= 16  # before other modules import it

from diloco.model import outer_optimizer  # noqa: E402

outer_optimizer.DIGEST_CHUNK //= 16

import diloco  # noqa: E402
from diloco.exchange import payload  # noqa: E402
from diloco.model.named_parameters import local  # noqa: E402
from diloco.protocol import blocks  # noqa: E402
from diloco.protocol.records import StoredObject  # noqa: E402
from diloco.ranks import storage_work  # noqa: E402
from diloco.store.base import LocalStore, MakeParts, Store, StoreUnavailable  # noqa: E402

payload.SLICE = blocks.SLICE_UNIT = blocks.SLICE_UNIT // 16
WIDTH = 257


class Model(nn.Module):
    """Two fragments of two layers; each fragment has three units of slices, the last one short."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


assert 2 * blocks.SLICE_UNIT < 2 * WIDTH * (WIDTH + 1) < 3 * blocks.SLICE_UNIT
assert base.PART_BYTES < 4 * 4 * WIDTH * (WIDTH + 1) < 2 * base.PART_BYTES


def bare(ranks: int) -> nn.Module:
    torch.manual_seed(3)
    return Model()


def ddp(ranks: int) -> nn.Module:
    return bare(ranks) if ranks < 2 else DistributedDataParallel(bare(ranks))


def fsdp(ranks: int) -> nn.Module:
    model = bare(ranks)
    if ranks < 2:
        return model
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hsdp(ranks: int) -> nn.Module:
    """Shards over pairs of ranks, and replicates these."""
    model = bare(ranks)
    if ranks < 4:
        return model
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("copies", "shards"))
    return fully_shard(model, mesh=mesh)


def tensor_parallel(ranks: int, style: type[ParallelStyle] = RowwiseParallel) -> nn.Module:
    """Divides columns of weights by tensor parallelism, and rows by FSDP2."""
    model = bare(ranks)
    if ranks < 4:
        return model
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "model"))
    plan = {f"layers.{index}": style() for index in range(4)}
    parallelize_module(model, mesh["model"], plan)
    return fully_shard(model, mesh=mesh["data"])


def strided(ranks: int) -> nn.Module:
    """Divides rows by both, which gives strided shards."""
    return tensor_parallel(ranks, ColwiseParallel)


SCENARIOS: dict[str, Callable[[int], nn.Module]] = {
    "bf16": ddp,
    "fp32": fsdp,
    "int8-sharded": ddp,
    "topk-overlap": fsdp,
    "e3m0-low-bit": ddp,
    "rda": hsdp,
    "tensor-parallel": tensor_parallel,
    "strided": strided,
    "buffers": ddp,
    "left": fsdp,
    "resumed": fsdp,
    "killed": ddp,
    "restarted": fsdp,
}
GROUPS = {"resumed": "left", "restarted": "killed"}
"""The groups of scenarios that continue another one."""
KILLED = 3
"""The rank that ends in the scenario ``killed``, when it writes its second checkpoint."""
EXIT = 9


@torch.no_grad()
def train(model: nn.Module, replica: int, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        values = local(parameter)
        values.add_((values * values).mul_(0.1 * (1 + step % 3 + index % 2)))
        values.mul_(0.99 - 0.01 * replica)


def abort_first_upload(name: str) -> None:
    """Let the first upload of this name fail after its first part."""
    put, failed = LocalStore.put_stream, []

    def failing(store: LocalStore, key: str, make_parts: MakeParts, **hints: int) -> None:
        if key.endswith(name) and not failed:
            failed.append(next(iter(make_parts())))
            raise StoreUnavailable("the connection was closed")
        put(store, key, make_parts, **hints)

    LocalStore.put_stream = failing  # type: ignore[method-assign]


def end_in_second_checkpoint() -> None:
    put, folders = storage_work.put_parts, []

    def ending(store: Store, key: str, *arguments: Any, **options: Any) -> StoredObject:
        folders.append(key.rpartition("/")[0])
        if folders[-1] != folders[0]:
            os._exit(EXIT)
        return put(store, key, *arguments, **options)

    storage_work.put_parts = ending  # type: ignore[assignment]


def run(root: Path, name: str, ranks: int, rank: int) -> dict[str, Any]:
    replica = 0 if ranks else 1
    model = SCENARIOS[name](ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    observed: dict[str, Any] = {"evaluated": 0}

    def evaluate() -> tuple[float, int]:
        observed["evaluated"] += 1
        return 1.0, 1

    if name == "fp32" and rank == 0:
        abort_first_upload("model.safetensors")
    if name == "killed" and rank == KILLED:
        end_in_second_checkpoint()
    with diloco.join(
        str(root / "runs" / GROUPS.get(name, name)),
        replica=replica,
        model=model,
        inner_optimizer=optimizer,
        evaluate=evaluate,
        heartbeat_interval_s=0.2,
        telemetry_interval_s=0.2,
        buffers="average" if name == "buffers" else "local",
    ) as group:
        while not group.done:
            train(model, replica, group.data_step)
            if name == "buffers":
                with torch.no_grad():
                    for buffer in model.buffers():
                        buffer.add_(0.25 * (1 + replica) + rank)
            if name == "left" and rank == ranks - 1 and group.data_step == 5:
                group.leave(within_s=600.0)
            if name == "left" and rank == 0 and group.data_step == 6:
                group._shutdown.share = 0.0  # the time for further steps is over
            group.step(tokens=4 // (ranks or 1), loss=1.0)
    observed["reason"] = group.reason
    progress = group._loop.progress if hasattr(group, "_loop") else group._progress  # type: ignore
    observed["held"] = progress.state.layout.held_numel
    observed["numel"] = progress.state.layout.numel
    return observed


def main() -> None:
    root, ranks, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    for name in sys.argv[4:]:
        if ranks > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{root / name}.meet",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(minutes=10),
            )
        try:
            observed = run(root, name, ranks, rank)
        except Exception as error:
            observed = {"error": f"{type(error).__name__}: {error}"}
            if ranks == 0 or rank == 0:
                import traceback

                traceback.print_exc()
        place = f"{rank}" if ranks else "peer"
        (root / f"{name}.{place}.json").write_text(json.dumps(observed))
        if ranks > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
