"""The backend's own log of one attempt: what a replica printed before and beside its telemetry.

It is asked for when somebody looks, and nothing of it is kept. What it costs is bounded: so many
lines, so many characters, so many seconds. Secrets that its program printed are struck out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from executors.base import ExecutorError, LogLine, ReplicaHandle
from executors.loading import wait_loaded
from runs.backends.executors import executor_of
from runs.backends.parallel_calls import NoAnswer, ask_all
from runs.models import ReplicaAttempt
from runs.redaction import redact

LINES = 1000
READ_AT_MOST = 200_000
"""Lines of one answer that are read to find its last: a log that is longer is read on from there
by the next question."""
LINE_CHARS = 4000


@dataclass(frozen=True, kw_only=True)
class LogTail:
    """The newest lines behind the position that was asked for. ``position`` is where to go on;
    ``cut`` says that lines before these were left out. ``unknown`` is why nobody can tell, in the
    backend's words."""

    lines: tuple[str, ...] = ()
    position: str = ""
    cut: bool = False
    unknown: str = ""


def read_log(attempt: ReplicaAttempt, *, after: str = "", lines: int = LINES) -> LogTail:
    """Needs ``attempt.replica.pool.credential``."""
    if attempt.handle is None:
        return LogTail(unknown="the attempt has no job yet")
    pool = attempt.replica.pool
    handle = ReplicaHandle(**attempt.handle)

    def tail() -> LogTail:
        executor = executor_of(pool.backend, pool.credential)
        return _newest(executor.logs(handle, after=after), after=after, lines=lines)

    wait_loaded({pool.backend})
    found = ask_all({"log": tail})["log"]
    if isinstance(found, LogTail):
        return LogTail(
            lines=tuple(redact(line) for line in found.lines),
            position=found.position,
            cut=found.cut,
        )
    if isinstance(found, ExecutorError | NoAnswer):
        return LogTail(position=after, unknown=redact(str(found)))
    return LogTail(position=after, unknown=f"{type(found).__name__} from the backend's client")


def _newest(found: Iterable[LogLine], *, after: str, lines: int) -> LogTail:
    newest: deque[str] = deque(maxlen=lines)
    count, position = 0, after
    for line in islice(found, READ_AT_MOST):
        newest.append(line.text[:LINE_CHARS])
        position = line.position
        count += 1
    return LogTail(lines=tuple(newest), position=position, cut=count > len(newest))
