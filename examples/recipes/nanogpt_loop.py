"""Train a GPT in a loop in nanoGPT's style, whose data is a file of token ids, as a replica.

    REPLICA_RANK=0 python examples/recipes/nanogpt_loop.py URI FOLDER       one replica
    REPLICA_RANK=1 python examples/recipes/nanogpt_loop.py URI FOLDER       the other, anywhere

The lines marked "diloco" are the difference to the script of a single worker.
"""

import math
import os
import sys
from pathlib import Path

import numpy as np
import tiny
import torch
from tiny_gpt import GPT, Shape, next_token_loss

import diloco  # diloco

URI, FOLDER = sys.argv[1], Path(sys.argv[2])
REPLICA = int(os.environ.get("REPLICA_RANK", "0"))

batch_size, block_size, gradient_accumulation_steps = 4, tiny.CONTEXT, 2
learning_rate, min_lr, warmup_iters, lr_decay_iters = 1e-2, 1e-3, 10, 200
max_iters, eval_interval, eval_iters, grad_clip = 200, 50, 4, 1.0
max_iters = int(os.environ.get("MAX_STEPS", max_iters))


def write_data(split, shard):
    """Write the tokens of a shard, as nanoGPT's prepare.py does."""
    tokens = torch.cat([row["input_ids"] for row in tiny.rows(shard, 1024)])
    path = FOLDER / f"{split}-{REPLICA}.bin"
    path.write_bytes(tokens.numpy().astype(np.uint16).tobytes())
    return path


data = {"train": write_data("train", REPLICA), "val": write_data("val", tiny.HELD_OUT)}


def get_batch(split):
    tokens = np.memmap(data[split], dtype=np.uint16, mode="r")
    starts = torch.randint(len(tokens) - block_size, (batch_size,)).tolist()
    rows = [tokens[start : start + block_size].astype(np.int64) for start in starts]
    return torch.from_numpy(np.stack(rows))


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = []
    for _ in range(eval_iters):
        tokens = get_batch("val")
        losses.append(next_token_loss(model(tokens), tokens))
    model.train()
    return float(torch.stack(losses).mean())


def get_lr(iter_num):
    if iter_num < warmup_iters:
        return learning_rate * (iter_num + 1) / (warmup_iters + 1)
    ratio = min(1.0, (iter_num - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


torch.manual_seed(1337 + REPLICA)
model = GPT(Shape(vocabulary=len(tiny.WORDS), context=block_size))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
settings = diloco.GroupSettings(num_replicas=2, sync_every=10, eval_every=5)  # diloco
with diloco.join(URI, model, optimizer, settings=settings) as group:  # diloco
    iter_num = 0
    while True:
        iter_num = group.schedule_step  # diloco
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(iter_num)
        if iter_num % eval_interval == 0:
            print(f"replica {REPLICA}: step {iter_num}: val loss {estimate_loss():.4f}")
        for _ in range(gradient_accumulation_steps):
            tokens = get_batch("train")
            loss = next_token_loss(model(tokens), tokens) / gradient_accumulation_steps
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
        tokens_seen = gradient_accumulation_steps * tokens.numel()
        loss_seen = loss.detach() * gradient_accumulation_steps
        if not group.step(tokens=tokens_seen, loss=loss_seen):  # diloco
            break  # diloco
        if iter_num >= max_iters:
            break

print(f"replica {REPLICA}: digest {tiny.digest(model.state_dict())}")
print(f"replica {REPLICA}: loss {estimate_loss():.4f}")
torch.save({"model": model.state_dict(), "iter_num": iter_num}, FOLDER / f"ckpt-{REPLICA}.pt")
