"""Cost of the cosine to the mean for a replica, in CPU seconds of one thread.

One process contributes and settles a gathered round over a folder in memory in which the peers'
payloads lie already; counted is all that the process computes meanwhile. Then the cosine of the
same vectors is computed alone. The least of ``--laps`` counts for either.

Usage: python bench/cosine_cost.py [--numel N] [--replicas 2 4] [--codec C ...] [--laps N]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.peak_memory import CODECS, gradient, member
from bench.support.exchanging import bare_settings
from bench.support.processes import in_memory
from diloco.codecs import get_codec
from diloco.exchange.cosine import cosine_to_mean


def costs(folder: str, numel: int, replicas: int, codec: str) -> tuple[float, float]:
    """CPU seconds of a round, the cosine included, and of the cosine alone."""
    members = [member(folder, n, replicas, "gather", codec, numel) for n in range(replicas)]
    for number, one in enumerate(members):
        one.put_lease()
        if number:
            one.contribute(1, gradient(number, numel))
    own = gradient(0, numel)
    start_s = time.process_time()
    sent = members[0].contribute(1, own)
    settled, mine = members[0].settle(1, sent), sent.own
    round_s = time.process_time() - start_s
    assert settled.merged is not None and settled.cosine is not None, settled
    coder = get_codec(codec, topk=bare_settings(replicas=1, plan="gather").topk)
    start_s = time.process_time()
    cosine = cosine_to_mean(lambda where: mine.decoded(where, coder), settled.merged.vector)
    alone_s = time.process_time() - start_s
    assert cosine == settled.cosine, (cosine, settled.cosine)
    return round_s, alone_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--laps", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| codec | replicas | round without, s | cosine, s | more |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for codec in options.codec:
        for replicas in options.replicas:
            laps = []
            for _ in range(options.laps):
                with in_memory() as folder:
                    laps.append(costs(folder, options.numel, replicas, codec))
            alone_s = min(alone for _, alone in laps)
            without_s = min(whole - alone for whole, alone in laps)
            print(
                f"| {codec} | {replicas} | {without_s:.2f} | {alone_s:.2f} | "
                f"{alone_s / without_s:.0%} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
