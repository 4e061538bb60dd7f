"""Kills, pauses, hangs and stale lists against the Manager's rounds, under virtual time.

Each seed is one trial: two to five replicas of one or two ranks for ten virtual minutes of faults,
then ten of quiet. :mod:`bench.support.manager_trials` has what the oracle counts.

Usage: python bench/manager_partitions.py [--seeds 100] [--first 0]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.support.manager_trials import VIOLATIONS, run_trial, trial_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        oracle = run_trial(trial_of(seed))
        total += oracle.counts
        for line in oracle.violations[:5]:
            print(f"seed {seed}: {line}", flush=True)
    for name, count in sorted(total.items()):
        print(f"{name}: {count}")
    found = sum(total[name] for name in VIOLATIONS)
    print(f"{arguments.seeds} trials, {found} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
