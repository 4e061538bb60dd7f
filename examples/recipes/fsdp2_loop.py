"""Train with FSDP2 in TorchTitan's style: meta-device init, fully_shard per block, a device mesh.

    REPLICA_RANK=0 torchrun --nproc-per-node 2 examples/recipes/fsdp2_loop.py URI FOLDER
    REPLICA_RANK=1 python examples/recipes/fsdp2_loop.py URI FOLDER

The first command is a replica of two ranks, the second one of a single process. The lines marked
"diloco" are the difference to the script of a single cluster.
"""

import os
import sys
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
from tiny_gpt import GPT, Shape, next_token_loss
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import diloco  # diloco

URI, FOLDER = sys.argv[1], Path(sys.argv[2])
REPLICA = int(os.environ.get("REPLICA_RANK", "0"))
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
MAX_STEPS = int(os.environ.get("MAX_STEPS", "1000"))
ROWS = 8
"""Rows of the batch of a replica, which its ranks divide."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parallelize(model):
    """Checkpoint and shard each block, then the rest; parameters become DTensors."""
    mesh = init_device_mesh(DEVICE, (RANKS,), mesh_dim_names=("dp_shard",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, block in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(block)
        fully_shard(model.layers[index], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


if RANKS > 1:
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
with torch.device("meta"):
    model = GPT(Shape(vocabulary=len(tiny.WORDS), context=tiny.CONTEXT))
if RANKS > 1:
    parallelize(model)
model.to_empty(device=DEVICE)
torch.manual_seed(REPLICA)
model.init_weights()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=True)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
rows = tiny.rows(REPLICA, 2048)
settings = diloco.GroupSettings(num_replicas=2, sync_every=5)  # diloco
join = {"settings": settings, "stateful": {"schedule": schedule}}  # diloco
with diloco.join(URI, model, optimizer, **join) as group:  # diloco
    for step in range(MAX_STEPS):
        batch = rows[step * ROWS % len(rows) :][RANK:ROWS:RANKS]
        tokens = torch.stack([row["input_ids"] for row in batch]).to(DEVICE)
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        count = tokens.numel()
        if not group.step(tokens=count, loss=loss.detach(), grad_norm=norm):  # diloco
            break  # diloco

state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if RANK == 0:
    print(f"replica {REPLICA}: digest {tiny.digest(state)}")
    print(f"replica {REPLICA}: loss {float(loss):.4f}")
    torch.save(state, FOLDER / f"fsdp2-{REPLICA}.pt")
if RANKS > 1:
    dist.destroy_process_group()
