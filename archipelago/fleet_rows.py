"""Rows of the fleet and of spending; see :mod:`archipelago.rows`.

Money is in US dollars. An amount is None if it is unknown; a sum leaves out unknown amounts, and
``unpriced`` or ``unpriced_jobs`` is the number of jobs without a known price.
"""

from __future__ import annotations

from dataclasses import dataclass

from archipelago.rows import Row


@dataclass(frozen=True, kw_only=True)
class LiveJob(Row):
    """A backend job that has not ended. ``started_at`` is None while it waits for a machine;
    ``pending`` is then the reason. ``url`` is its page in the backend's console, or ''."""

    run: str
    run_name: str
    owner: str
    replica: int
    attempt: int
    state: str
    backend: str
    backend_state: str
    pending: str
    pool: int
    hardware: str
    region: str
    spot: bool
    created_at: str | None
    launched_at: str | None
    started_at: str | None
    deadline_at: str | None
    price_usd_h: float | None
    cost_usd: float | None
    url: str


@dataclass(frozen=True, kw_only=True)
class JobSum(Row):
    """Jobs of a backend. ``running`` have started, and cost ``usd_h`` together; ``unpriced`` of
    them have no known price. ``usd_h`` is None if no price is known."""

    backend: str
    label: str
    jobs: int
    running: int
    usd_h: float | None
    unpriced: int


@dataclass(frozen=True, kw_only=True)
class PoolTrouble(Row):
    """A pool of an active run that cannot launch as it should.

    ``state`` is that of the circuit breaker (``failing``, ``open``, ``half_open``,
    ``action_required``, ``price_limit``) or ``waiting``: for capacity, a quota or an image.
    ``waiting`` is the number of its replicas that wait, ``pending`` the reasons.
    """

    run: str
    run_name: str
    owner: str
    pool: int
    name: str
    backend: str
    hardware: str
    region: str
    state: str
    message: str
    advice: str
    open_until: str | None
    waiting: int
    pending: list[str]
    since: str | None


@dataclass(frozen=True, kw_only=True)
class Orphan(Row):
    """A running job that belongs to no attempt. ``cost_usd`` is its cost since ``billed_from``;
    it is in no run's cost."""

    backend: str
    launch_key: str
    reason: str
    run: str | None
    run_name: str | None
    replica: int | None
    url: str
    billed_from: str | None
    seen_at: str | None
    price_usd_h: float | None
    cost_usd: float | None


@dataclass(frozen=True, kw_only=True)
class FleetPage(Row):
    """``jobs`` is a page of the jobs that match the filters, those of the newest run first;
    ``next`` is ``before`` of the next page. ``total`` sums up all of them; ``backends`` leaves out
    the filter for a backend. ``pools`` and ``orphans`` are the first; ``more_pools`` and
    ``more_orphans`` are true if there are others."""

    jobs: list[LiveJob]
    next: str | None
    total: JobSum
    backends: list[JobSum]
    pools: list[PoolTrouble]
    more_pools: bool
    orphans: list[Orphan]
    more_orphans: bool


@dataclass(frozen=True, kw_only=True)
class SpendGroup(Row):
    """Spending of a backend, an owner, a run or a tag, or of the ``others`` of that kind together.

    ``key`` is its name, or the id of a run; '' for runs without a tag. ``usd`` is None if no price
    is known. ``unpriced_s`` are the seconds that jobs without a price ran. ``deleted``: the run was
    deleted.
    """

    key: str
    label: str
    jobs: int
    usd: float | None
    unpriced_jobs: int
    unpriced_s: float
    others: int
    deleted: bool


@dataclass(frozen=True, kw_only=True)
class SpendDay(Row):
    """Spending of one day in UTC, by backend."""

    day: str
    usd: float | None
    unpriced_s: float
    backends: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Spend(Row):
    """Spending from the day ``first`` to the day ``last``, in UTC.

    ``complete`` is false if there were too many jobs: only the newest were counted. ``now`` is the
    present rate. ``month_usd`` was spent in this calendar month; ``forecast_usd`` is that plus the
    present rate until its end.
    """

    first: str
    last: str
    total: SpendGroup
    days: list[SpendDay]
    backends: list[SpendGroup]
    owners: list[SpendGroup]
    runs: list[SpendGroup]
    tags: list[SpendGroup]
    complete: bool
    now: JobSum
    month_usd: float | None
    forecast_usd: float | None
    month_unpriced: int
