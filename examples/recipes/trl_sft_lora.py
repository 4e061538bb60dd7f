"""Fine-tune with LoRA under trl.SFTTrainer, in a group that exchanges only the adapter.

    python examples/recipes/tiny.py FOLDER                                  the base model, once
    REPLICA_RANK=0 python examples/recipes/trl_sft_lora.py URI FOLDER       one replica
    REPLICA_RANK=1 python examples/recipes/trl_sft_lora.py URI FOLDER       the other, anywhere

The lines marked "diloco" are the difference to the script of a single worker.
"""

import os
import sys
from pathlib import Path

import tiny
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import diloco  # diloco
from diloco.integrations.transformers import DiLoCoCallback  # diloco

URI, FOLDER = sys.argv[1], Path(sys.argv[2])
REPLICA = int(os.environ.get("REPLICA_RANK", "0"))

trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(FOLDER / "base"),
    args=SFTConfig(
        output_dir=str(FOLDER / f"sft-{REPLICA}"),
        max_steps=int(os.environ.get("MAX_STEPS", "1000")),
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_length=tiny.CONTEXT,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    ),
    train_dataset=Dataset.from_dict({"text": tiny.texts(shard=REPLICA, count=2048)}),
    processing_class=AutoTokenizer.from_pretrained(FOLDER / "base"),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
)
settings = diloco.GroupSettings(num_replicas=2, sync_every=5, outer_momentum=0.5)  # diloco
trainer.add_callback(DiLoCoCallback(URI, trainer=trainer, settings=settings))  # diloco
trainer.train()

model = trainer.model
trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
print(f"replica {REPLICA}: digest {tiny.digest(trained)}")
model.save_pretrained(FOLDER / f"adapter-{REPLICA}")
merged = model.merge_and_unload()
print(f"replica {REPLICA}: loss of the merged model {tiny.held_out_loss(merged):.4f}")
