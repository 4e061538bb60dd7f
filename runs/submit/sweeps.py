"""Creates the runs of a sweep: all of them or none.

Every draft is checked like a single one. Pools and bucket, which the runs share, and each of the
data are checked once. Sweep and runs are stored in one transaction. At most ``parallel`` runs are
launched; :mod:`runs.reconcile.sweeps` launches the others as these end.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from executors.base import Problem
from runs.exceptions import InvalidRun
from runs.models import Sweep, money
from runs.queries.comparison import MEASURES
from runs.submit import create
from runs.submit.create import (
    CheckedDraft,
    SweepPlace,
    check_name,
    check_submission,
    create_once,
    rendezvous_uri,
    store_run,
)
from runs.submit.forecast import RunEstimate, estimate_run
from runs.submit.run_draft import RunDraft
from runs.submit.sweep_space import MOST_RUNS, Parameter, combinations, draft_with, words_of
from runs.submit.throughput_history import rates_of_all

METRICS = tuple(measure.name for measure in MEASURES if measure.better)
DEFAULT_METRIC = "eval_loss"
_LIMITS = ("metric", "parallel", "budget_usd")


@dataclass(frozen=True, kw_only=True)
class SweepDraft:
    """A requested sweep over ``draft``. ``parallel`` and ``budget_usd`` 0 mean no limit."""

    draft: RunDraft
    parameters: tuple[Parameter, ...]
    metric: str = DEFAULT_METRIC
    parallel: int = 0
    budget_usd: float = 0.0

    def drafts(self) -> list[RunDraft]:
        """The draft of each run. Raises :class:`InvalidRun`."""
        drafts = [draft_with(self.draft, values) for values in combinations(self.parameters)]
        if not self.draft.rendezvous:
            return drafts
        prefix = self.draft.rendezvous.rstrip("/")
        return [
            replace(draft, rendezvous=f"{prefix}/{index:03d}")
            for index, draft in enumerate(drafts, start=1)
        ]


class Preflight(Protocol):
    """:func:`runs.submit.preflight.check_runs`."""

    def __call__(
        self, drafts: Sequence[RunDraft], *, uri: str, over_budget: bool
    ) -> list[list[Problem]]: ...


@dataclass(frozen=True, kw_only=True)
class SweepEstimate:
    """Estimates of all runs of a sweep together; None is unknown. ``hours`` is the time until the
    last run ends, if they start in order and ``parallel`` of them work at a time."""

    runs: int
    tokens: int | None
    usd: float | None
    hours: float | None


def estimate_sweep(sweep: SweepDraft, drafts: Sequence[RunDraft]) -> SweepEstimate:
    return _summed(sweep, _estimates(drafts))


def check_sweep(
    sweep: SweepDraft,
    user: User,
    *,
    over_budget: bool = False,
    preflight: Preflight | None = None,
) -> list[CheckedDraft]:
    """Validate a sweep and the permissions of ``user``. Raises :class:`InvalidRun`."""
    check_name(sweep.draft.name)
    if sweep.metric not in METRICS:
        raise InvalidRun(
            "sweep_metric", f"expected one of {', '.join(METRICS)}, found {sweep.metric[:40]!r}"
        )
    if not 0 <= sweep.parallel <= MOST_RUNS:
        raise InvalidRun("sweep_parallel", f"expected 0 to {MOST_RUNS}, found {sweep.parallel}")
    if not 0 <= sweep.budget_usd <= money.MAX_USD:
        expected = f"expected 0 to {money.MAX_USD:,.0f} USD"
        raise InvalidRun("sweep_budget_usd", f"{expected}, found {sweep.budget_usd}")
    drafts = sweep.drafts()
    usd = _summed(sweep, _estimates(drafts)).usd
    if sweep.budget_usd and usd is not None and usd > sweep.budget_usd and not over_budget:
        raise InvalidRun(
            "sweep_budget_usd",
            f"expected at least ${usd:.2f}, the estimate of {len(drafts)} runs, "
            f"found ${sweep.budget_usd:.2f}",
        )
    checked: list[CheckedDraft] = []
    problems: list[tuple[Problem, ...]] = []
    for draft in drafts:
        try:
            checked.append(check_submission(draft, user))
            problems.append(())
        except InvalidRun as error:
            problems.append(error.problems)
    _refuse(sweep, problems)
    if preflight is not None:
        prefix = sweep.draft.rendezvous
        uri = rendezvous_uri(prefix, checked[0].run_id) if prefix else checked[0].rendezvous
        _refuse(sweep, preflight(drafts, uri=uri, over_budget=over_budget))
    return checked


def _refuse(sweep: SweepDraft, problems: Sequence[Sequence[Problem]]) -> None:
    """Raise :class:`InvalidRun` for the problems of any run. A problem of all runs is reported as
    it is; of the others one in each field, with the values of the first run that has it."""
    counts = Counter(problem for each in problems for problem in dict.fromkeys(each))
    of_all = [problem for problem, count in counts.items() if count == len(problems)]
    of_some: dict[str, Problem] = {}
    for values, each in zip(combinations(sweep.parameters), problems, strict=True):
        for problem in each:
            if problem not in of_all:
                message = f"with {words_of(values)}: {problem.message}"
                of_some.setdefault(problem.field, replace(problem, message=message))
    if found := [*of_all, *of_some.values()]:
        first, *others = found
        raise InvalidRun(first.field, first.message, *others)


def create_sweep(
    sweep: SweepDraft,
    *,
    owner: User,
    submit_key: str,
    over_budget: bool = False,
    preflight: Preflight | None = None,
) -> Sweep:
    """Store a sweep with its runs, and enqueue the launch of the first ones on commit.

    Idempotent per ``submit_key``, like :func:`runs.submit.create.create_run`.
    """

    def store() -> Sweep:
        checked = check_sweep(sweep, owner, over_budget=over_budget, preflight=preflight)
        with transaction.atomic():
            return _store(sweep, checked, owner, submit_key)

    return create_once(Sweep, submit_key, owner, store)


def differing_field(row: Sweep, sweep: SweepDraft) -> str:
    """The first field that differs between a sweep and a draft sent again; '' for none. Of the runs
    the first that exists is compared."""
    compared = {
        "parameters": (row.parameters, _columns_of(sweep.parameters)),
        **{name: (getattr(row, name), getattr(sweep, name)) for name in _LIMITS},
    }
    if found := next((name for name, (was, now) in compared.items() if was != now), ""):
        return found
    run = row.runs.order_by("sweep_index").first()
    if run is None or run.sweep_index is None:
        return ""
    field = create.differing_field(run, sweep.drafts()[run.sweep_index])
    return f"run.{field}" if field else ""


def _store(
    sweep: SweepDraft, checked: Sequence[CheckedDraft], owner: User, submit_key: str
) -> Sweep:
    row = Sweep.objects.create(
        id=uuid.uuid4(),
        name=sweep.draft.name.strip(),
        owner=owner,
        parameters=_columns_of(sweep.parameters),
        metric=sweep.metric,
        parallel=sweep.parallel,
        budget_usd=sweep.budget_usd,
        submit_key=submit_key,
        created_at=timezone.now(),
    )
    grid = combinations(sweep.parameters)
    for index, (run, values) in enumerate(zip(checked, grid, strict=True)):
        held = bool(sweep.parallel) and index >= sweep.parallel
        place = SweepPlace(sweep=row, index=index, values=values, held=held)
        store_run(run, owner, _run_key(submit_key, index), place)
    return row


def _columns_of(parameters: Sequence[Parameter]) -> list[dict[str, object]]:
    """Parameters as the database returns them."""
    return [{"field": each.field, "values": list(each.values)} for each in parameters]


def _run_key(submit_key: str, index: int) -> str:
    return hashlib.sha256(f"{submit_key}:{index}".encode()).hexdigest()


def _estimates(drafts: Sequence[RunDraft]) -> list[RunEstimate]:
    rates = rates_of_all(draft.workload.to_dict() for draft in drafts)
    return [estimate_run(draft, known) for draft, known in zip(drafts, rates, strict=True)]


def _summed(sweep: SweepDraft, estimates: Sequence[RunEstimate]) -> SweepEstimate:
    tokens = [each.tokens for each in estimates if each.tokens is not None]
    usd = [each.usd for each in estimates if each.usd is not None]
    hours = [each.hours for each in estimates if each.hours is not None]
    count = len(estimates)
    return SweepEstimate(
        runs=count,
        tokens=sum(tokens) if len(tokens) == count else None,
        usd=sum(usd) if len(usd) == count else None,
        hours=_finished(hours, sweep.parallel or count) if len(hours) == count else None,
    )


def _finished(hours: Sequence[float], slots: int) -> float:
    """When the last of these ends, if each starts in the first slot that is free."""
    ends = [0.0] * min(slots, len(hours))
    for each in hours:
        ends[ends.index(min(ends))] += each
    return max(ends)
