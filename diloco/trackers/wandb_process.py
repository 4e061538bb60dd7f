"""Deliver one batch to Weights & Biases: ``python -m diloco.trackers.wandb_process``, started by
:mod:`diloco.trackers.wandb`. Reads the job as JSON from standard input and prints the new state."""

from __future__ import annotations

import json
import sys
from typing import Any

from diloco.trackers.base import TrackerRow

_EXIT_CODES = {"succeeded": 0, "failed": 1, "cancelled": 255}
_MISSING = 3


def main() -> int:
    job = json.load(sys.stdin)
    try:
        import wandb
    except ImportError:
        return _MISSING
    print(json.dumps({"url": _deliver(wandb, job)}))
    return 0


def _deliver(wandb: Any, job: dict[str, Any]) -> str:
    run = wandb.init(
        project=job["project"],
        entity=job["entity"],
        id=job["id"],
        name=job["name"],
        config=job["config"],
        tags=job["tags"],
        dir=job["folder"],
        mode="offline" if job["offline"] else "online",
        resume=None if job["offline"] else "allow",
        settings=wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
        ),
    )
    defined: set[str] = set()
    for row in map(TrackerRow.from_dict, job["rows"]):
        axis = f"{row.owner}/step" if row.owner else "round"
        values = row.named_values()
        for name in values.keys() - defined:
            run.define_metric(name, step_metric=axis)
        defined |= values.keys()
        run.log({**values, axis: row.step, "_timestamp": row.wall_s}, step=row.number)
    # Between two batches W&B shows the run as finished; the next batch resumes it.
    run.finish(exit_code=_EXIT_CODES[job["outcome"] or "succeeded"])
    return str(run.url or "")


if __name__ == "__main__":
    sys.exit(main())
