"""Run a recipe on this machine: two replicas that share only a temporary folder.

    python examples/recipes/demonstrate.py trainer_lora

On two machines start the recipe itself, with the URI of a bucket and REPLICA_RANK=0 or 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import tiny

HERE = Path(__file__).resolve().parent
OF_TWO_RANKS = ("accelerate_loop", "fsdp2_loop")
"""Recipes whose replica 0 has two ranks."""


def main(name: str) -> int:
    recipe = HERE / f"{name}.py"
    if not recipe.is_file():
        print(f"expected a recipe in {HERE}, found {name!r}", file=sys.stderr)
        return 2
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        tiny.prepare(Path(folder))
        replicas = []
        for replica in range(2):
            ranks = torchrun if name in OF_TWO_RANKS and replica == 0 else []
            command = [sys.executable, *ranks, str(recipe), f"{folder}/run", folder]
            environment = os.environ | {"REPLICA_RANK": str(replica)}
            environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), *sys.path])
            replicas.append(subprocess.Popen(command, env=environment))
        return max(replica.wait() for replica in replicas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
