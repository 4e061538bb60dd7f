"""Why a run or a replica failed: cause, message, traceback and last log lines, all bounded.

Each function makes a constant number of queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from runs.json_values import iso
from runs.models import LogLine, Replica, ReplicaAttempt, Run
from runs.queries import replica_history
from runs.states import ReplicaState, RunState

FAILED = frozenset({ReplicaState.FAILED, ReplicaState.LOST})
LINES = 12
"""Last log lines of a failure."""
LINE_CHARS = 500
TEXT_CHARS = 20_000
"""Longest traceback. Its end is kept, because the error is there."""
MESSAGE_CHARS = 4000


@dataclass(frozen=True, kw_only=True)
class Failure:
    """``replica`` and ``attempt`` are numbers; None if the run failed without them."""

    message: str
    at: datetime | None
    replica: int | None = None
    state: str = RunState.FAILED
    attempt: int | None = None
    cause: str = ""
    exit_code: int | None = None
    traceback: str = ""
    lines: tuple[LogLine, ...] = ()


def run_failure(run: Run) -> Failure | None:
    """The failure of a failed run: that of the replica which its reason names, or else of the
    replica whose job ended last, or else the reason alone."""
    if run.state != RunState.FAILED:
        return None
    reason = run.state_reason[:MESSAGE_CHARS]
    failed = list(run.replicas.filter(state__in=FAILED).order_by("number"))
    named = next((r for r in failed if reason.startswith(f"{r}: ")), None)
    if named is not None:
        return replica_failure(named)
    last = ReplicaAttempt.objects.filter(replica__in=failed, ended_at__isnull=False)
    attempt = last.select_related("replica").order_by("-ended_at").first()
    failure = replica_failure(attempt.replica) if attempt else None
    if failure is None:
        return Failure(message=reason, at=run.ended_at)
    return replace(failure, message=f"{reason}\n{failure.message}"[:MESSAGE_CHARS])


def replica_failure(replica: Replica) -> Failure | None:
    """The failure of a failed or lost replica, from its newest ended attempt."""
    if replica.state not in FAILED:
        return None
    attempt = replica.attempts.filter(ended_at__isnull=False).order_by("-number").first()
    trace = _traceback(replica, attempt)
    message = (attempt.message if attempt else "") or replica.state_reason
    if trace:
        message = message.split(replica_history.TRACEBACK)[0].strip() or trace.splitlines()[-1]
    return Failure(
        message=message[:MESSAGE_CHARS],
        at=(attempt.ended_at if attempt else None) or replica.state_since,
        replica=replica.number,
        state=replica.state,
        attempt=attempt.number if attempt else None,
        cause=attempt.cause if attempt else "",
        exit_code=attempt.exit_code if attempt else None,
        traceback=trace[-TEXT_CHARS:],
        lines=tuple(_last_lines(replica)),
    )


def _traceback(replica: Replica, attempt: ReplicaAttempt | None) -> str:
    """The last traceback, unless it is of an earlier attempt; '' without one."""
    trace: dict[str, Any] = replica_history.last_traceback(replica) or {}
    begun = iso(attempt.created_at) if attempt else None
    if not trace or (begun and (trace["at"] or "") < begun):
        return ""
    return str(trace["text"]).strip()


def _last_lines(replica: Replica) -> list[LogLine]:
    """The newest lines of its last process without tracebacks, oldest first."""
    newest = LogLine.objects.filter(replica=replica, incarnation=replica.incarnation)
    lines = [
        line
        for line in newest.order_by("-id")[: 2 * LINES]
        if replica_history.TRACEBACK not in line.message
    ][:LINES]
    for line in lines:
        line.message = line.message[:LINE_CHARS]
    return lines[::-1]
