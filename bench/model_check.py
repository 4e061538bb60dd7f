"""The replica library under virtual time, with a faulty store, killed processes and an oracle.

Each seed makes one run of the real code (:mod:`tests.diloco.model`): settings, kills at store
operations, lost answers, late writes, stale lists, damaged reads and objects, slow requests. At the
end an oracle replays the log with NumPy. The same seed makes the same run.

    python bench/model_check.py [--seeds 500] [--first 0] [--keep-going] [--verbose]
"""

from __future__ import annotations

import argparse
import contextlib
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
    with contextlib.suppress(KeyboardInterrupt):
        for seed in range(options.first, options.first + options.seeds):
            failure = _run(seed, totals)
            if failure:
                failed.append(seed)
                print(f"seed {seed}: {failure}", flush=True)
            print(_summary(totals, failed, time.monotonic() - began_s), flush=True)
            if failure and not options.keep_going:
                break
    print(_summary(totals, failed, time.monotonic() - began_s))
    print(", ".join(f"{name} {count:,}" for name, count in sorted(totals.items())))
    return 1 if failed else 0


def _run(seed: int, totals: Counter[str]) -> str:
    """Run one seed, add its counts to ``totals``, and return its fault or ''."""
    try:
        outcome = run_seed(seed)
    except Exception:
        totals["seeds"] += 1
        return f"the checker itself failed: {traceback.format_exc()}"
    totals.update(outcome.counts)
    totals.update({"seeds": 1, "processes": outcome.processes, "rounds": outcome.rounds})
    return outcome.failure


SHOWN = (
    *("operations", "kill", "garble", "rot", "decay", "record", "packs", "records deleted"),
    "runs that damage stopped",
)


def _summary(totals: Counter[str], failed: list[int], seconds: float) -> str:
    counts = ", ".join(f"{name} {totals[name]:,}" for name in SHOWN)
    which = f" ({', '.join(map(str, failed))})" if failed else ""
    return f"{totals['seeds']} seeds in {seconds:.0f} s, {len(failed)} failed{which}; {counts}"


if __name__ == "__main__":
    sys.exit(main())
