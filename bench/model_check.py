"""The replica library under virtual time, with a faulty store, killed processes and an oracle.

Each seed makes one run of the real code (:mod:`tests.diloco.model`): settings, kills at store
operations, lost answers, late writes, stale lists, damaged reads and objects, slow requests. At the
end an oracle replays the log with NumPy. The same seed makes the same run.

    python bench/model_check.py [--seeds 500] [--first 0] [--keep-going] [--verbose]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.diloco.model.check import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    parser.add_argument("--verbose", action="store_true", help="the library's own log")
    options = parser.parse_args()
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("diloco").setLevel(logging.INFO)
    totals: Counter[str] = Counter()
    failed: list[int] = []
    began_s = time.monotonic()
    for seed in range(options.first, options.first + options.seeds):
        try:
            outcome = run_seed(seed)
            failure = outcome.failure
            totals += outcome.counts
            totals["processes"] += outcome.processes
            totals["rounds"] += outcome.rounds
        except Exception:
            failure = f"the checker itself failed: {traceback.format_exc()}"
        totals["seeds"] += 1
        if totals["seeds"] % 25 == 0:
            print(f"{totals['seeds']} seeds, {len(failed)} failed", flush=True)
        if failure:
            failed.append(seed)
            print(f"seed {seed}: {failure}", flush=True)
            if not options.keep_going:
                break
    print(
        f"{totals['seeds']} seeds in {time.monotonic() - began_s:.0f} s, {len(failed)} failed"
        f"{': ' + ', '.join(map(str, failed)) if failed else ''}"
    )
    print(", ".join(f"{name} {count:,}" for name, count in sorted(totals.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
