"""Actions on a sweep."""

from __future__ import annotations

from django.contrib.auth.models import User

from runs.actions.replicas_and_pools import request_stop
from runs.models import Sweep
from runs.states import RUN_ENDED


def stop(sweep: Sweep, *, actor: User, reason: str = "") -> int:
    """Stop all its runs: those that train keep the weights of their newest round, held ones never
    start. Returns the number of runs that were stopped now."""
    runs = sweep.runs.exclude(state__in=sorted(RUN_ENDED)).order_by("-sweep_index")
    return sum(request_stop(run, actor=actor, reason=reason) for run in runs)
