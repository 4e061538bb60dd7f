"""Creates the runs of a sweep: all of them or none.

Every draft is checked like a single one. Backends, bucket and data are checked once, because the
runs share them. Sweep and runs are stored in one transaction. At most ``parallel`` runs are
launched; :mod:`runs.reconcile.sweeps` launches the others as these end.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.utils import timezone

from runs.exceptions import InvalidRun
from runs.models import Sweep
from runs.queries.comparison import MEASURES
from runs.submit.create import (
    NAME_LENGTH,
    SUBMIT_KEY_LENGTH,
    CheckedDraft,
    SweepPlace,
    check_submission,
    store_run,
)
from runs.submit.forecast import RatesByHardware, RunEstimate, estimate_run
from runs.submit.run_draft import RunDraft
from runs.submit.sweep_space import MOST_RUNS, Parameter, combinations, draft_with
from runs.submit.throughput_history import known_rates

METRICS = tuple(measure.name for measure in MEASURES if measure.better)
DEFAULT_METRIC = "eval_loss"


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
    preflight: Callable[[CheckedDraft], None] | None = None,
) -> list[CheckedDraft]:
    """Validate a sweep and the permissions of ``user``. Raises :class:`InvalidRun`."""
    if sweep.metric not in METRICS:
        raise InvalidRun(
            "sweep_metric", f"expected one of {', '.join(METRICS)}, found {sweep.metric[:40]!r}"
        )
    if not 0 <= sweep.parallel <= MOST_RUNS:
        raise InvalidRun("sweep_parallel", f"expected 0 to {MOST_RUNS}, found {sweep.parallel}")
    if not 0 <= sweep.budget_usd < float("inf"):
        raise InvalidRun("sweep_budget_usd", f"expected 0 or more, found {sweep.budget_usd}")
    drafts = sweep.drafts()
    money = _summed(sweep, _estimates(drafts)).usd
    if sweep.budget_usd and money is not None and money > sweep.budget_usd and not over_budget:
        raise InvalidRun(
            "sweep_budget_usd",
            f"expected at least ${money:.2f}, the estimate of {len(drafts)} runs, "
            f"found ${sweep.budget_usd:.2f}",
        )
    checked = [check_submission(draft, user) for draft in drafts]
    if preflight is not None:
        preflight(checked[0])
    return checked


def create_sweep(
    sweep: SweepDraft,
    *,
    owner: User,
    submit_key: str,
    over_budget: bool = False,
    preflight: Callable[[CheckedDraft], None] | None = None,
) -> Sweep:
    """Store a sweep with its runs, and enqueue the launch of the first ones on commit.

    Idempotent per ``submit_key``, like :func:`runs.submit.create.create_run`.
    """
    if not submit_key or len(submit_key) > SUBMIT_KEY_LENGTH:
        raise InvalidRun(
            "submit_key", f"expected 1 to {SUBMIT_KEY_LENGTH} characters, found {len(submit_key)}"
        )
    existing = submitted(submit_key, owner)
    if existing is not None:
        return existing
    try:
        checked = check_sweep(sweep, owner, over_budget=over_budget, preflight=preflight)
        with transaction.atomic():
            return _store(sweep, checked, owner, submit_key)
    except (IntegrityError, InvalidRun):
        # Another request with this key can be faster.
        existing = submitted(submit_key, owner)
        if existing is None:
            raise
        return existing


def submitted(submit_key: str, owner: User) -> Sweep | None:
    """The sweep that was created with this key."""
    sweep = Sweep.objects.filter(submit_key=submit_key).first()
    if sweep is not None and sweep.owner_id != owner.pk:
        raise InvalidRun("submit_key", "another user sent this form; open it again")
    return sweep


def _store(
    sweep: SweepDraft, checked: Sequence[CheckedDraft], owner: User, submit_key: str
) -> Sweep:
    row = Sweep.objects.create(
        id=uuid.uuid4(),
        name=sweep.draft.name.strip()[:NAME_LENGTH],
        owner=owner,
        parameters=[asdict(parameter) for parameter in sweep.parameters],
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


def _run_key(submit_key: str, index: int) -> str:
    return hashlib.sha256(f"{submit_key}:{index}".encode()).hexdigest()


def _estimates(drafts: Sequence[RunDraft]) -> list[RunEstimate]:
    rates: dict[str, RatesByHardware] = {}
    result = []
    for draft in drafts:
        key = str(draft.workload)
        if key not in rates:
            rates[key] = known_rates(draft.workload.to_dict())
        result.append(estimate_run(draft, rates[key]))
    return result


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
