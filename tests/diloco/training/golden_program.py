"""Tiny runs with fixed bits: print the digest of the global weights of each.

Weights and gradients come from NumPy, the loss is linear, and the inner learning rate is a power of
two, so that nothing but the exchange and the outer step can differ between machines. Run by
``test_golden_bits.py``, also under other CPU capabilities: ``python golden_program.py FOLDER
[NAME@THREADS...]``.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from diloco.group import join
from diloco.init import create_group
from diloco.model.outer_optimizer import digest
from diloco.protocol import blocks, keys
from diloco.protocol.payload_size import CODEC_SHAPES
from diloco.protocol.records import ContributionRecord, Plan
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Data, LocalStore, Store
from diloco.syncer import Syncer
from tests.diloco.clocks import FastClock

REPLICAS = 3
SHAPES = {"embedding": (37, 32), "a": (70, 90), "b": (1,), "c": (2, 2500)}
PLANS = ("gather", "sharded", "syncer")

VARIANTS: dict[str, dict[str, Any]] = {
    **{
        f"{codec}-{plan}": {"codec": codec, "reduce_plan": plan}
        for codec in CODEC_SHAPES
        for plan in PLANS
    },
    **{f"rda-{plan}": {"merge": "rda", "reduce_plan": plan, "codec": "int8"} for plan in PLANS},
    **{
        f"low_bit-{plan}": {"codec": "e3m0", "mean_codec": "e3m0", "reduce_plan": plan}
        for plan in ("sharded", "syncer")
    },
    "e3m0-low_bit": {"codec": "e3m0", "mean_codec": "e3m0", "reduce_plan": "auto"},
    "low_bit_open": {
        "num_fragments": 2,
        "overlap_steps": 3,
        "codec": "int8",
        "mean_codec": "int8",
        "reduce_plan": "sharded",
    },
    "fragments": {"num_fragments": 2, "codec": "bf16", "fragment_pattern": "size"},
    "overlap": {"num_fragments": 2, "overlap_steps": 1, "codec": "bf16"},
    "open": {"num_fragments": 2, "overlap_steps": 3, "mixing_alpha": 0.25, "codec": "topk"},
    "narrow_state": {"num_fragments": 2, "master_dtype": "bf16", "momentum_dtype": "bf16"},
    "late": {"min_quorum": 1, "late_keep": 0.75, "total_rounds": 6},
    "late_overlap": {
        "min_quorum": 1,
        "late_keep": 0.5,
        "overlap_steps": 1,
        "codec": "bf16",
        "total_rounds": 6,
    },
}
"""All plans of one name must agree. A gathered round, which ``auto`` chooses for this small model,
does not quantise its mean: ``e3m0-low_bit`` has the bits of the other runs in E3M0."""
LATE = {(2, 1), (4, 0), (5, 0)}
"""(round, replica) of the contributions that do not count in the late variants."""


class LateStore:
    """Removes the tokens from the records of :data:`LATE`, so that their rounds do without them."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.uri = inner.uri

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, key: str, data: Data) -> None:
        parsed = keys.parse_contribution_record(key)
        if parsed and parsed[:2] in LATE:
            record = ContributionRecord.from_bytes(bytes(data))
            data = replace(record, tokens=0).to_bytes()
        self._inner.put(key, data)


class Odd(nn.Module):
    """12,000 parameters of odd shapes, one an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(*SHAPES["embedding"])
        self.layers = nn.ParameterDict(
            {name: torch.empty(SHAPES[name]) for name in ("a", "b", "c")}
        )
        rng = np.random.default_rng(1)
        with torch.no_grad():
            for parameter in self.parameters():
                drawn = rng.standard_normal(tuple(parameter.shape), dtype=np.float32)
                parameter.copy_(torch.from_numpy(drawn))


def linear(model: nn.Module, replica: int, step: int) -> torch.Tensor:
    """Its gradient is drawn by NumPy for replica and step."""
    rng = np.random.default_rng([2, replica, step])
    total = torch.zeros(())
    for parameter in model.parameters():
        drawn = rng.standard_normal(tuple(parameter.shape), dtype=np.float32)
        total = total + (parameter * torch.from_numpy(drawn)).sum()
    return total


def run(folder: Path, **changes: object) -> str:
    """Return the digest of the final weights of a run of :data:`REPLICAS` replicas."""
    settings = GroupSettings(
        **{
            "sync_every": 4,
            "total_rounds": 4,
            "num_replicas": REPLICAS,
            "min_quorum": REPLICAS,
            "warmup_steps": 0,
            "heartbeat_timeout_s": 3600.0,
            "round_timeout_s": 7200.0,
            "start_wait_s": 3000.0,
            "grace_s": 3000.0,
            "eval_every": 0,
            **changes,
        }
    )  # type: ignore[arg-type]
    create_group(str(folder), settings)
    result: list[str] = []

    def train(replica: int) -> None:
        model = Odd()
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-7)
        with join(
            str(folder),
            model=model,
            inner_optimizer=optimizer,
            replica=replica,
            heartbeat_interval_s=0.05,
            store=LateStore(LocalStore(folder)) if "late_keep" in changes else LocalStore(folder),
            clock=FastClock(),
        ) as group:
            while not group.done:
                optimizer.zero_grad()
                linear(model, replica, group.data_step).backward()
                optimizer.step()
                group.step(tokens=replica + 1, loss=1.0)
        result.append(digest(torch.cat([p.detach().flatten() for p in model.parameters()])))

    if settings.reduce_plan == "syncer":
        store = LocalStore(folder)
        syncer = Syncer(store, clock=FastClock(), heartbeat_interval_s=0.05)
        threading.Thread(target=syncer.run, daemon=True).start()
        member = keys.member(settings.max_replicas)
        while not any(keys.parse_beat(info.key) for info in store.list(member)):
            time.sleep(0.01)
    threads = [threading.Thread(target=train, args=(n,), daemon=True) for n in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    if len(result) != REPLICAS or len(set(result)) != 1:
        raise RuntimeError(f"expected {REPLICAS} equal digests, found {result}")
    modes = {Plan.from_bytes(LocalStore(folder).get(keys.plan(r))).mode for r in range(1, 5)}
    if settings.reduce_plan != "auto" and modes != {settings.reduce_plan}:
        raise RuntimeError(f"expected rounds by {settings.reduce_plan}, found {sorted(modes)}")
    return result[0]


def main() -> None:
    folder, *variants = sys.argv[1:]
    blocks.SMALLEST_BLOCK = 4096  # several blocks to distribute
    for variant in variants or VARIANTS:
        name, _, threads = variant.partition("@")
        torch.set_num_threads(int(threads or 1))
        print(name, run(Path(folder) / name, weighting="tokens", **VARIANTS[name]), flush=True)


if __name__ == "__main__":
    main()
