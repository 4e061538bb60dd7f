"""LoRA through the bucket: bytes of a round, and the loss of the merged model beside one worker's.

Runs ``examples/recipes/trainer_lora.py`` as two replicas, and as the plain script of a single
worker that sees as many tokens as both. Then one round of the same base model is exchanged without
LoRA. The payloads are those of the plans in the bucket. The last row is arithmetic: a Llama of 1.2B
parameters on the meta device, and the codec's formula.

Usage: python bench/lora_recipe.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "recipes"))

import tiny
import torch
from peft import LoraConfig, get_peft_model
from plain import plain
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import diloco
from diloco.protocol import keys
from diloco.protocol.payload_size import payload_bytes
from diloco.protocol.records import Plan
from diloco.store.base import LocalStore

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "examples" / "recipes"
STEPS = 200
"""Steps of the single worker: those of both replicas."""


def start(script: Path, folder: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), f"{folder}/run", str(folder)],
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}{os.pathsep}{RECIPES}", "OMP_NUM_THREADS": "1"}
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def merged_loss(process: subprocess.Popen[str]) -> float:
    output, _ = process.communicate()
    match = re.search(r"loss of the merged model (\d+\.\d+)", output)
    if match is None:
        raise RuntimeError(f"expected the loss of the merged model, found {output!r}")
    return float(match.group(1))


def payload_size(uri: Path, round: int) -> int:
    """Return the bytes that each contributor of a round uploaded."""
    plan = Plan.read(LocalStore(uri), keys.plan(round))
    (size,) = {contribution.size_bytes for contribution in plan.contributions}
    return size


def exchange_whole(base: Path, uri: Path) -> int:
    """Exchange one round of the whole base model; return the size of the payload."""
    model = AutoModelForCausalLM.from_pretrained(base)
    settings = diloco.GroupSettings(num_replicas=1, sync_every=1, total_rounds=1, warmup_steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with diloco.join(str(uri), model, optimizer, replica=0, settings=settings) as group:
        while not group.done:
            group.step(tokens=1, loss=0.0)
    return payload_size(uri, 1)


def of_a_large_model(rank: int) -> tuple[int, int]:
    """Return the payloads of a whole Llama of 1.2B parameters and of its adapter, in bf16."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        base = LlamaForCausalLM(config)
        whole = sum(p.numel() for p in base.parameters())
        model = get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear"))
    adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return payload_bytes(whole, "bf16"), payload_bytes(adapter, "bf16")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = tiny.prepare(folder)
        script = folder / "plain.py"
        script.write_text(plain((RECIPES / "trainer_lora.py").read_text()))
        before = tiny.held_out_loss(AutoModelForCausalLM.from_pretrained(base))
        recipe = RECIPES / "trainer_lora.py"
        replicas = [start(recipe, folder, REPLICA_RANK=str(number)) for number in range(2)]
        group = {merged_loss(replica) for replica in replicas}
        alone = merged_loss(start(script, folder, MAX_STEPS=str(STEPS)))
        adapter, whole = payload_size(folder / "run", 20), exchange_whole(base, folder / "whole")
    print(f"held-out loss of the base model        {before:.4f} nats per token")
    print(f"merged model, 2 replicas               {group.pop():.4f}")
    print(f"merged model, one worker, equal tokens {alone:.4f}")
    print(f"payload of a round, adapter, fp32      {adapter:,} B")
    print(f"payload of a round, whole model, fp32  {whole:,} B  ({whole / adapter:.1f} x)")
    whole, adapter = of_a_large_model(rank=16)
    print(f"1.2B parameters, bf16, adapter of r = 16: {adapter:,} B of {whole:,} B (computed)")


if __name__ == "__main__":
    main()
