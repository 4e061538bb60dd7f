"""``diloco.replica`` and ``torch.optim`` in a process that does not use PyTorch's compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_texts import ROOT

# In a new process, because this one may have imported the compiler for another test.
PROGRAM = """
import os, sys
import torch
from diloco import replica
from diloco.init import create_group
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import ByteGPTWorkload

FOLDER = sys.argv[1]

def imported():
    return "torch._dynamo" in sys.modules

class Sgd(torch.optim.SGD):
    in_step = []

    def _init_group(self, *arguments):
        self.in_step.append(torch.is_grad_enabled())
        return super()._init_group(*arguments)

def trained(kind):
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3, bias=False)
    optimizer = kind(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        assert torch.is_grad_enabled()
    optimizer.load_state_dict(optimizer.state_dict())
    return layer.weight.tolist()

with open(FOLDER + "/data.txt", "w") as text:
    text.write("In the beginning there was text. " * 200)
settings = GroupSettings(
    sync_every=2, total_rounds=1, num_replicas=1, min_quorum=1, batch_size=1, warmup_steps=1
)
workload = ByteGPTWorkload(size="demo", data=FOLDER + "/data.txt", eval_bytes=512)
create_group(FOLDER + "/group", settings, workload=workload.to_dict())
os.environ["REPLICA_RANK"] = "0"
assert replica.main([FOLDER + "/group"]) == 0
assert not imported(), "by the replica"

kinds = [torch.optim.AdamW, Sgd, torch.optim.Muon]
before = [trained(kind) for kind in kinds]
assert not imported(), "by an optimizer"

import torch._dynamo
assert [trained(kind) for kind in kinds] == before
assert Sgd.in_step == [False] * 6
print("done")
"""


@pytest.mark.slow
def test_neither_a_replica_nor_an_optimizer_imports_the_compiler(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True, text=True, timeout=300, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr[-3000:]
