"""Train a replica of several GPUs (or CPU processes) under torchrun as one member of a group.

    python examples/torchrun_replica.py                                    the whole demonstration
    torchrun --nproc-per-node 2 torchrun_replica.py URI REPLICA [--ddp]    one replica of two ranks

Without arguments, replica 0 has two ranks and shards its model with FSDP2, and replica 1 has one
rank and no wrapper. They share only a folder and end with the same weights; with fewer than two
GPUs they use the CPU. ``--ddp`` uses DistributedDataParallel instead of FSDP2. Each rank uses the
GPU of its LOCAL_RANK, if there is one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco.model.named_parameters import state


def build(*, ranks: int, ddp: bool, device: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    if ranks == 1:
        return model
    if ddp:
        return DistributedDataParallel(model)
    return fully_shard(model, mesh=init_device_mesh(device, (ranks,)))


def train(uri: str, replica: int, *, ddp: bool) -> None:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
    if ranks > 1:
        # gloo for CPU tensors, NCCL for GPU tensors
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    torch.manual_seed(replica)
    model = build(ranks=ranks, ddp=ddp, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with diloco.join(uri, replica=replica, model=model, inner_optimizer=optimizer) as group:
        while not group.done:
            # Each rank takes its part of the replica's batch.
            data = torch.Generator().manual_seed(10_000 * replica + 10 * group.data_step + rank)
            x = torch.randn(32 // ranks, 4, generator=data).to(device)
            loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()  # DDP and FSDP2 average the gradients over the ranks of the replica
            optimizer.step()
            group.step(tokens=len(x), loss=loss)
    total = sum(float(tensor.double().sum()) for _, tensor in state(model))
    print(f"replica {replica} rank {rank}: {group.reason}, sum of weights {total!r}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def demonstrate() -> int:
    with tempfile.TemporaryDirectory() as uri:
        settings = diloco.GroupSettings(
            num_replicas=2, sync_every=10, total_rounds=10, warmup_steps=0, eval_every=0
        )
        diloco.create_group(uri, settings)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        commands = [
            [*torchrun, "--nproc-per-node", "2", __file__, uri, "0"],
            [sys.executable, __file__, uri, "1"],
        ]
        environment = dict(os.environ)
        if torch.cuda.device_count() < 2:  # NCCL needs one for each rank
            environment["CUDA_VISIBLE_DEVICES"] = ""
        replicas = [subprocess.Popen(command, env=environment) for command in commands]
        return max(replica.wait() for replica in replicas)


def main() -> int:
    parser = argparse.ArgumentParser(description="One rank of a replica.")
    parser.add_argument("uri", nargs="?", help="rendezvous of an existing group")
    parser.add_argument("replica", nargs="?", type=int, default=0)
    parser.add_argument("--ddp", action="store_true")
    arguments = parser.parse_args()
    if arguments.uri is None:
        return demonstrate()
    train(arguments.uri, arguments.replica, ddp=arguments.ddp)
    return 0


if __name__ == "__main__":
    sys.exit(main())
