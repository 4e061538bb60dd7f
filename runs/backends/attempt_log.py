"""Read the backend's own log of an attempt: output outside the replica's telemetry.

The log is fetched when a user opens it and is not stored. The number of lines, their length and the
duration of the call are limited. Secrets are redacted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from executors.base import ExecutorError, LogLine, ReplicaHandle
from executors.loading import wait_loaded
from runs.backends.executors import executor_of
from runs.backends.parallel_calls import CallTimeout, call_all
from runs.models import Credential, ReplicaAttempt
from runs.redaction import redact

LINES = 1000
READ_AT_MOST = 200_000
"""Lines of one response that are read to find the last ones. The next request continues from
there if the log is longer."""
LINE_CHARS = 4000


@dataclass(frozen=True, kw_only=True)
class LogTail:
    """The newest lines after a requested position.

    Attributes:
        lines: the newest lines, oldest first.
        position: where the next request continues.
        cut: whether earlier lines after the requested position were left out.
        unknown: why the log is not available, '' if it is.
    """

    lines: tuple[str, ...] = ()
    position: str = ""
    cut: bool = False
    unknown: str = ""


def read_log(attempt: ReplicaAttempt, *, after: str = "", lines: int = LINES) -> LogTail:
    """Fetch the newest ``lines`` after the position ``after``.

    ``attempt.replica.pool.credential`` must be loaded.
    """
    if attempt.handle is None:
        return LogTail(unknown="the attempt has no job yet")
    pool = attempt.replica.pool
    handle = ReplicaHandle(**attempt.handle)
    return read_job_log(handle, pool.backend, pool.credential, after=after, lines=lines)


def read_job_log(
    handle: ReplicaHandle,
    backend: str,
    credential: Credential | None,
    *,
    after: str = "",
    lines: int = LINES,
) -> LogTail:
    """Fetch the newest ``lines`` of a job after the position ``after``."""

    def tail() -> LogTail:
        executor = executor_of(backend, credential)
        return _newest(executor.logs(handle, after=after), after=after, lines=lines)

    wait_loaded({backend})
    result = call_all({"log": tail})["log"]
    if isinstance(result, LogTail):
        return LogTail(
            lines=tuple(redact(line) for line in result.lines),
            position=result.position,
            cut=result.cut,
        )
    if isinstance(result, ExecutorError | CallTimeout):
        return LogTail(position=after, unknown=redact(str(result)))
    return LogTail(position=after, unknown=f"{type(result).__name__} from the backend's client")


def _newest(log: Iterable[LogLine], *, after: str, lines: int) -> LogTail:
    newest: deque[str] = deque(maxlen=lines)
    count, position = 0, after
    for line in islice(log, READ_AT_MOST):
        newest.append(line.text[:LINE_CHARS])
        position = line.position
        count += 1
    return LogTail(lines=tuple(newest), position=position, cut=count > len(newest))
