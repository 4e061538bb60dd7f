"""Training quality on real text: DiLoCo, its variants and its baselines at equal tokens.

    python bench/quality.py                      the table of the published results
    python bench/quality.py --out FILE           train what FILE lacks, core arms first
    python bench/quality.py --out FILE --tune    the learning rates of the core arms, on seed 0
    python bench/quality.py --list               arms, steps and tokens

A result is appended to FILE when it is there, so a killed script goes on with the arm it was in.
The arms are in :mod:`bench.experiments.arms`, the results in ``docs/experiments.md``.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.experiments import results
from bench.experiments.arms import Arm, all_arms, tuning
from bench.experiments.training import SmallGPT, train

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "bench" / "results" / "quality.jsonl"


def commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def measure(arm: Arm, seed: int) -> results.Result:
    started_s, cpu_s = time.monotonic(), time.process_time()
    outcome = train(arm, seed=seed)
    shape = SmallGPT().shape
    return {
        "arm": arm.name,
        "seed": seed,
        "loss": outcome.loss,
        "tokens": arm.tokens,
        **{k: v for k, v in dataclasses.asdict(outcome).items() if v},
        "model": dataclasses.asdict(shape) | {"parameters": shape.parameters},
        "definition": arm.definition(seed),
        "commit": commit(),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - started_s, 1),
        "cpu_s": round(time.process_time() - cpu_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="train, and keep results in this file")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", default=[0, 1, 2])
    parser.add_argument("--tune", action="store_true", help="tune learning rates, on seed 0")
    parser.add_argument("--list", action="store_true", help="list the arms and exit")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of this file")
    arguments = parser.parse_args()
    arms = tuning() if arguments.tune else all_arms()
    if arguments.arms:
        unknown = set(arguments.arms) - {arm.name for arm in arms}
        if unknown:
            parser.error(f"expected arms of --list, found {', '.join(sorted(unknown))}")
        arms = tuple(arm for arm in arms if arm.name in arguments.arms)
    seeds = [0] if arguments.tune else arguments.seeds
    if arguments.list:
        for arm in arms:
            print(f"{arm.name:32} {arm.total_steps:>6} steps {arm.tokens:>9} tokens  {arm.title}")
        return 0
    if arguments.out is None:
        found = results.read(arguments.table or PUBLISHED)
        print(results.table(arms, found), results.tuning_table(found), sep="\n\n")
        return 0
    torch.set_num_threads(1)
    arms = tuple(arm for arm in arms if not arm.retired)
    for arm, seed in results.remaining(arms, seeds, results.read(arguments.out)):
        result = measure(arm, seed)
        results.append(arguments.out, result)
        print(
            f"{arm.name} seed {seed}: {result['loss']:.4f} nats per byte, "
            f"{result['seconds']:.0f} s, {result['cpu_s']:.0f} s of CPU",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
