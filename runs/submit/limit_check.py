"""Checks deadlines and budget of a draft against its estimate, without any call."""

from __future__ import annotations

from executors.base import Problem
from runs.backends.executors import capabilities_of
from runs.models import Credential
from runs.submit.forecast import RunEstimate
from runs.submit.run_draft import RunDraft

ROUNDS_IN_A_JOB = 3
"""A job with a shorter deadline spends most of it on starting up and catching up."""


def limit_problems(draft: RunDraft, estimate: RunEstimate, *, over_budget: bool) -> list[Problem]:
    """Deadlines that are too short, and a budget below the estimate."""
    problems = _deadlines(draft, estimate)
    return problems if over_budget else problems + _budget(draft, estimate)


def _deadlines(draft: RunDraft, estimate: RunEstimate) -> list[Problem]:
    round_s = estimate.round_s
    if round_s is None:
        return []
    wanted = {pool.credential for pool in draft.pools if pool.credential is not None}
    credentials = dict(Credential.objects.in_bulk(wanted)) if wanted else {}
    problems = []
    least_s = ROUNDS_IN_A_JOB * round_s
    for index, pool in enumerate(draft.pools):
        can = capabilities_of(pool.backend, credentials.get(pool.credential or 0))
        life_s = pool.timeout_s or can.max_lifetime_s
        if life_s is not None and life_s < least_s:
            problems.append(
                Problem(
                    field=f"pools.{index}.timeout_s",
                    message=f"expected at least {ROUNDS_IN_A_JOB} rounds, about {least_s:.0f} s at "
                    f"the rate of earlier runs, found {life_s:.0f} s",
                )
            )
    return problems


def _budget(draft: RunDraft, money: RunEstimate) -> list[Problem]:
    if not draft.budget_usd or money.usd is None or money.usd <= draft.budget_usd:
        return []
    until = "to the time limit" if money.hours_by == "time limit" else "for all rounds"
    message = (
        f"expected at least ${money.usd:.2f}, the estimate {until} ({money.hours:.1f} h at "
        f"${money.usd_h:.2f} an hour), found ${draft.budget_usd:.2f}"
    )
    return [Problem(field="budget_usd", message=message)]
