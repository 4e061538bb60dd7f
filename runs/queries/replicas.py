"""Replicas and attempts of a run with everything that actions and logs need, in one query."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from runs.backends.attempt_log import read_log
from runs.models import Replica, ReplicaAttempt, Run


def replicas_of(run: Run) -> QuerySet[Replica]:
    return Replica.objects.filter(run=run).select_related("pool__credential")


def attempts_of(run: Run) -> QuerySet[ReplicaAttempt]:
    related = ("replica__pool__credential", "replica__run__store_credential")
    return ReplicaAttempt.objects.filter(replica__run=run).select_related(*related)


def attempt_log(attempt: ReplicaAttempt, *, after: str) -> dict[str, Any]:
    """Lines of the backend's log of an attempt from the position ``after`` on."""
    log = read_log(attempt, after=after)
    return {
        "lines": log.lines,
        "position": log.position,
        "cut": log.cut,
        "unknown": log.unknown,
        "ended": attempt.ended_at is not None,
    }
