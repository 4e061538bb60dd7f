"""``python -m diloco.replica`` with every inner step padded to a given time.

    REPLICA_RANK=0 python -m bench.experiments.paced_replica STEP_S URI

Several replicas on one machine share its cores: when one dies, the others would speed up, and a
death would seem to cost nothing. Padded steps make each of them as fast as on a separate machine.
Everything else is the real program.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from diloco import replica


class Paced:
    """A workload whose batches come at most every ``step_s``."""

    def __init__(self, workload: Any, *, step_s: float) -> None:
        self._workload = workload
        self._step_s = step_s
        self._next_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def train_batch(self, step: int) -> Any:
        now_s = time.monotonic()
        if now_s < self._next_s:
            time.sleep(self._next_s - now_s)
        self._next_s = max(now_s, self._next_s) + self._step_s
        return self._workload.train_batch(step)


def main() -> int:
    step_s, uri = float(sys.argv[1]), sys.argv[2]
    load = replica.load_workload

    def load_paced(*args: Any, **kwargs: Any) -> Any:
        return Paced(load(*args, **kwargs), step_s=step_s)

    replica.load_workload = load_paced  # type: ignore[assignment]
    return replica.main([uri])


if __name__ == "__main__":
    sys.exit(main())
