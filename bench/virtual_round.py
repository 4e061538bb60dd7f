"""Seconds of a round beside the best raw transfer, under virtual time: the protocol alone.

The line is that of ``bench/round_cost.py --line --scale 64``; computing takes no time, so the
result is the same on any machine. *Raw* is each direction at the full rate, a latency late.

Usage: python bench/virtual_round.py [--replicas 2 4 8] [--plan gather sharded] [--numel 7812500]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.round_cost import LINE, SMALL_BLOCK
from bench.support.cuts import small_cuts
from bench.support.virtual_line import exchange, transfer_s
from diloco.exchange.upload import DEFAULT_BYTES, VERIFY_UPLOAD_BYTES
from diloco.protocol.reduce_cost import round_cost
from diloco.store.base import PART_BYTES
from diloco.store.transfers import BYTES_IN_FLIGHT

SCALE = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--plan", nargs="+", default=["gather", "sharded"])
    parser.add_argument("--numel", type=int, default=7_812_500)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ[VERIFY_UPLOAD_BYTES] = str(DEFAULT_BYTES // SCALE)
    line = replace(LINE, connection=LINE.connection / SCALE, total=LINE.total / SCALE)
    part_bytes = PART_BYTES // SCALE
    print("| plan | N | rounds, s | raw, s | of raw |\n| --- | ---: | ---: | ---: | ---: |")
    for plan in given.plan:
        for replicas in given.replicas:
            cost = round_cost(numel=given.numel, codec="fp32", replicas=replicas, mode=plan)
            raw_s = transfer_s(line, up=cost.up, down=cost.down, part_bytes=part_bytes)
            group = {
                "replicas": replicas,
                "plan": plan,
                "numel": given.numel,
                "budget_bytes": BYTES_IN_FLIGHT // SCALE,
            }
            with (
                tempfile.TemporaryDirectory() as root,
                small_cuts(block=SMALL_BLOCK, part_bytes=part_bytes),
            ):
                seconds = exchange(line, Path(root), **group, rounds=2, warm=6).seconds
            took = ", ".join(f"{one:.2f}" for one in seconds)
            share = ", ".join(f"{100 * raw_s / one:.0f} %" for one in seconds)
            print(f"| {plan} | {replicas} | {took} | {raw_s:.2f} | {share} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
