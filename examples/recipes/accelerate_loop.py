"""Train in a loop of Accelerate as a replica of a group.

    python examples/recipes/tiny.py FOLDER                                  the base model, once
    REPLICA_RANK=0 python examples/recipes/accelerate_loop.py URI FOLDER    one replica
    REPLICA_RANK=1 python examples/recipes/accelerate_loop.py URI FOLDER    the other, anywhere

With torchrun or "accelerate launch" in place of python, several processes are one replica. The
lines marked "diloco" are the difference to the script of a single worker.
"""

import os
import sys
from pathlib import Path

import tiny
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import diloco  # diloco

URI, FOLDER = sys.argv[1], Path(sys.argv[2])
REPLICA = int(os.environ.get("REPLICA_RANK", "0"))
MAX_STEPS = int(os.environ.get("MAX_STEPS", "1000"))

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = AutoModelForCausalLM.from_pretrained(FOLDER / "base")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loader = DataLoader(tiny.rows(shard=REPLICA), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
settings = diloco.GroupSettings(num_replicas=2, sync_every=10, total_rounds=10)  # diloco
with diloco.join(URI, model, optimizer, settings=settings) as group:  # diloco
    steps = tokens = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        tokens += batch["input_ids"].numel()
        if not accelerator.sync_gradients:
            continue
        steps += 1
        if not group.step(tokens=tokens, loss=loss.detach()):  # diloco
            break  # diloco
        tokens = 0
        if steps == MAX_STEPS:
            break

trained = accelerator.unwrap_model(model)
if accelerator.is_main_process:
    print(f"replica {REPLICA}: digest {tiny.digest(dict(trained.named_parameters()))}")
    print(f"replica {REPLICA}: loss {tiny.held_out_loss(trained):.4f}")
    trained.save_pretrained(FOLDER / f"accelerate-{REPLICA}")
