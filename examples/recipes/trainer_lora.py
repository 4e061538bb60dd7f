"""Fine-tune with LoRA under transformers.Trainer, in a group that exchanges only the adapter.

    python examples/recipes/tiny.py FOLDER                                  the base model, once
    REPLICA_RANK=0 python examples/recipes/trainer_lora.py URI FOLDER       one replica
    REPLICA_RANK=1 python examples/recipes/trainer_lora.py URI FOLDER       the other, anywhere

The lines marked "diloco" are the difference to the script of a single worker.
"""

import os
import sys
from pathlib import Path

import tiny
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import diloco  # diloco
from diloco.integrations.transformers import DiLoCoCallback  # diloco

URI, FOLDER = sys.argv[1], Path(sys.argv[2])
REPLICA = int(os.environ.get("REPLICA_RANK", "0"))

base = AutoModelForCausalLM.from_pretrained(FOLDER / "base")
lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(base, lora)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=str(FOLDER / f"trainer-{REPLICA}"),
        max_steps=int(os.environ.get("MAX_STEPS", "1000")),
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    ),
    train_dataset=tiny.rows(shard=REPLICA),
)
settings = diloco.GroupSettings(num_replicas=2, sync_every=5, outer_momentum=0.5)  # diloco
trainer.add_callback(DiLoCoCallback(URI, trainer=trainer, settings=settings))  # diloco
trainer.train()

trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
print(f"replica {REPLICA}: digest {tiny.digest(trained)}")
merged = model.merge_and_unload()
merged.save_pretrained(FOLDER / f"merged-{REPLICA}")
print(f"replica {REPLICA}: loss of the merged model {tiny.held_out_loss(merged):.4f}")
