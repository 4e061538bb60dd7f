"""Train a LightningModule with Lightning's Trainer as a replica of a group.

    REPLICA_RANK=0 python examples/recipes/lightning_fit.py URI FOLDER       one replica
    REPLICA_RANK=1 python examples/recipes/lightning_fit.py URI FOLDER       the other, anywhere

The lines marked "diloco" are the difference to the script of a single worker.
"""

import os
import sys
from pathlib import Path

import tiny
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

import diloco  # diloco
from diloco.integrations.lightning import DiLoCoCallback  # diloco

URI, FOLDER = sys.argv[1], Path(sys.argv[2])
REPLICA = int(os.environ.get("REPLICA_RANK", "0"))


class NextWord(LightningModule):
    """Predicts a word from the three before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(tiny.WORDS), 16)
        self.layers = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, len(tiny.WORDS)))

    def training_step(self, batch, batch_idx):
        words = batch["input_ids"].unfold(1, 4, 1)  # (rows, windows, 4)
        logits = self.layers(self.embed(words[..., :3]).flatten(2))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[..., 3].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


seed_everything(REPLICA)
settings = diloco.GroupSettings(num_replicas=2, sync_every=10, total_rounds=10)  # diloco
group = DiLoCoCallback(URI, settings=settings)  # diloco
module = NextWord()
trainer = Trainer(
    max_steps=int(os.environ.get("MAX_STEPS", "-1")),
    callbacks=[
        group,  # diloco
    ],
    accumulate_grad_batches=2,
    accelerator="cpu",
    default_root_dir=FOLDER,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(module, DataLoader(tiny.rows(shard=REPLICA), batch_size=8))

print(f"replica {REPLICA}: digest {tiny.digest(dict(module.named_parameters()))}")
print(f"replica {REPLICA}: loss {float(trainer.callback_metrics['loss']):.4f}")
trainer.save_checkpoint(FOLDER / f"lightning-{REPLICA}.ckpt")
