"""Generated hostile records, many: does the property of ``tests/adversarial`` hold for all?

Each trial is a run whose bucket is given hostile records of every kind. The property: its ticks end
after bounded work, a forced stop cancels its jobs, every page, answer and export stays below 500,
and a run beside it goes on. The test is the suite's own; this repeats it with more records and
counts them.

Usage: python bench/adversarial.py [--records 10000] [--per-run 200] [--database sqlite]
The exit status is 1 where the property is broken; the example that broke it is printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment(runs: int, per_run: int, database: str) -> dict[str, str]:
    return {
        **os.environ,
        "ARCHIPELAGO_ADVERSARIAL_EXAMPLES": str(runs),
        "ARCHIPELAGO_ADVERSARIAL_RECORDS": str(per_run),
        "ARCHIPELAGO_TEST_DATABASE": database,
    }


def runs_for(records: int, per_run: int) -> int:
    return -(-records // per_run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--per-run", type=int, default=200)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    given = parser.parse_args()
    runs = runs_for(given.records, given.per_run)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "tests/adversarial/test_hostile_records.py"],
        cwd=ROOT,
        env=environment(runs, given.per_run, given.database),
        check=False,
    )
    broken = "no property broken" if done.returncode == 0 else "a property is broken"
    print(
        f"{runs} runs of {given.per_run} records ({runs * given.per_run}) on "
        f"{given.database}: {broken}, {time.monotonic() - began:.0f} s"
    )
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
