"""One line per cause of a failure: what happened and what to do."""

from __future__ import annotations

from executors.base import Cause
from runs.reconcile.retry_policy import EX_CONFIG, NOT_STARTED, REFUSED

EXPLANATIONS = {
    Cause.ERROR: "The training process ended with an error. The last log lines show where.",
    Cause.OUT_OF_MEMORY: "The process used more memory than its machine or container has. Use "
    "larger hardware, a smaller batch size, or a smaller model.",
    Cause.PREEMPTED: "The backend took the machine back. Preemptions do not count as failures of "
    "the replica.",
    Cause.DEADLINE: "The job reached its time limit. Give the pool a longer time limit.",
    Cause.CANCELLED: "The job was cancelled at the backend.",
    Cause.LOST: "The backend has no record of the job any more.",
    REFUSED: "The backend refused the launch, so nothing was retried. Correct the pool or the "
    "account, then restart the replica.",
    NOT_STARTED: "The job waited for a machine longer than allowed and was cancelled.",
}
CONFIGURATION = (
    "The replica found a problem that a restart does not fix. Correct the settings in a clone."
)
WITHOUT_REPLICA = "No replica reported an error."
UNKNOWN = "The process ended without a report of its cause."


def explanation(*, replica: int | None, cause: str, exit_code: int | None) -> str:
    if replica is None:
        return WITHOUT_REPLICA
    if exit_code == EX_CONFIG:
        return CONFIGURATION
    return EXPLANATIONS.get(cause, UNKNOWN)
