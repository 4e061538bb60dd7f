"""Rows of the API: one frozen type per row, shared by the server (:mod:`dashboard.api`) and this
client. A contract test compares them with the rows that :mod:`runs.queries` builds.

Times are ISO 8601 in UTC. A value that is not known, or a number that is not finite, is None. A
newer server can send more fields: they are in ``raw``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args, get_type_hints

SUCCEEDED = "succeeded"
ENDED = frozenset({SUCCEEDED, "failed", "cancelled"})
"""States of a run that has ended."""


class Row:
    """Base of the row types. ``raw`` is the JSON object that a row was parsed from."""

    @property
    def raw(self) -> Mapping[str, Any]:
        raw: Mapping[str, Any] = self.__dict__.get("_raw", {})
        return raw

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Parse a JSON object. Raises ``ValueError`` if a field is missing."""
        row_type: Any = cls  # mypy does not accept type[Self] as hashable
        rows = _rows_in(row_type)
        missing = [name for name in rows if name not in values]
        if missing:
            raise ValueError(
                f"expected {cls.__name__} with {', '.join(missing)}, found none: is the server "
                "older than this client?"
            )
        parsed = {name: _parse(row, values[name]) for name, row in rows.items()}
        result = cls(**parsed)
        result.__dict__["_raw"] = dict(values)
        return result


def _parse(row: type[Row] | None, value: Any) -> Any:
    if row is None or value is None:
        return value
    return [row.of(item) for item in value] if isinstance(value, list) else row.of(value)


@functools.cache
def _rows_in(cls: Any) -> dict[str, type[Row] | None]:
    """Fields of a row type, with the type of the rows in fields that are rows or lists of rows."""
    hints = get_type_hints(cls)
    items = {
        f.name: next(iter(get_args(hints[f.name])), hints[f.name]) for f in dataclasses.fields(cls)
    }
    return {
        name: item if isinstance(item, type) and issubclass(item, Row) else None
        for name, item in items.items()
    }


@dataclass(frozen=True, kw_only=True)
class RunHeader(Row):
    """A run in a list. ``live`` replicas of ``target``; with fewer than ``quorum`` it waits.

    ``usd_h`` is the price of the running jobs. ``cost_known`` and ``usd_h_known`` are false if a
    part of the amount is unknown.
    """

    id: str
    name: str
    state: str
    state_reason: str
    state_since: str | None
    owner: str
    committed_rounds: int
    total_rounds: int
    tokens: int
    tokens_per_s: float | None
    train_loss: float | None
    eval_loss: float | None
    live: int
    alerts: int
    quorum: int
    target: int
    eta_s: float | None
    created_at: str | None
    started_at: str | None
    ended_at: str | None
    last_seen_at: str | None
    goodput: float | None
    bytes_up: int
    bytes_down: int
    cost_usd: float | None
    cost_known: bool
    usd_h: float | None
    usd_h_known: bool
    budget_usd: float | None

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def fraction(self) -> float:
        return min(self.committed_rounds / self.total_rounds, 1.0) if self.total_rounds else 0.0


@dataclass(frozen=True, kw_only=True)
class RunTotals(Row):
    """Totals of the runs that match. A figure that is not *known* is a lower bound: a price, or the
    GPUs of some hardware, are unknown.

    ``gpus`` and ``usd_h`` are those of the replicas' jobs that run now; ``today_usd`` was spent
    since midnight in UTC, as on the page about spending. ``alerts`` are open.
    """

    runs: int
    active: int
    gpus: int
    gpus_known: bool
    usd_h: float
    usd_h_known: bool
    today_usd: float
    today_known: bool
    cost_usd: float
    cost_known: bool
    alerts: int


@dataclass(frozen=True, kw_only=True)
class RunPage(Row):
    """``next`` is ``before`` of the next page; None on the last page. ``totals`` are those of all
    pages, if they were requested."""

    runs: list[RunHeader]
    next: str | None
    totals: RunTotals | None = None


@dataclass(frozen=True, kw_only=True)
class Pool(Row):
    id: int
    backend: str
    name: str
    hardware: str
    region: str
    spot: bool
    credential: str | None
    timeout_s: int
    wanted: int
    live: int
    ended: int
    price_usd_h: float | None
    max_price_usd_h: float | None
    cost_usd: float | None
    cost_known: bool
    hardware_label: str
    image: str
    replicas: int
    breaker: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run(RunHeader):
    """A run with its settings, workload and pools."""

    rendezvous: str
    settings: dict[str, Any]
    workload: dict[str, Any]
    fingerprint: str | None
    code: str | None
    time_limit_s: int
    start_timeout_s: int
    max_restarts: int
    store_credential: str | None
    notes: str
    tags: list[str]
    archived: bool
    can_operate: bool
    pools: list[Pool]


@dataclass(frozen=True, kw_only=True)
class Replica(Row):
    """``last_cause``: why its newest ended attempt ended; '' without one."""

    number: int
    state: str
    state_reason: str
    pool: int
    backend: str
    backend_state: str
    attempt: int
    last_cause: str
    last_ended_at: str | None
    deadline_at: str | None
    cost_usd: float | None
    beat_at: str | None
    round: int
    step: int
    tokens: int
    loss: float | None
    tokens_per_s: float | None
    wait_fraction: float | None
    gpu_busy: float | None
    gpu_memory_bytes: float | None
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None
    restarts: int
    device: str
    host: str
    cost_known: bool
    beat_interval_s: float | None
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class Attempt(Row):
    number: int
    launch_key: str
    job: dict[str, Any]
    url: str
    cause: str
    exit_code: int | None
    message: str
    created_at: str | None
    launched_at: str | None
    started_at: str | None
    ended_at: str | None
    deadline_at: str | None
    price_usd_h: float | None
    cost_usd: float | None


@dataclass(frozen=True, kw_only=True)
class Contribution(Row):
    """``late_s``: seconds between the round's plan and a late contribution, by the clocks of both
    machines."""

    replica: int
    state: str
    reason: str
    late_s: float | None
    base_round: int
    norm: float | None
    update_norm: float | None
    cosine: float | None
    size_bytes: int
    bytes_up: int
    bytes_down: int
    requests: int
    phases: dict[str, float]
    started_at: str | None
    committed_at: str | None


@dataclass(frozen=True, kw_only=True)
class Round(Row):
    """``healing`` lists the replicas that were catching up and so did not contribute."""

    number: int
    fragment: int
    state: str
    reason: str
    contributors: int
    mode: str
    committed_at: str | None
    loss: float | None
    eval_loss: float | None
    tokens_total: int
    weights_digest: str
    digest_mismatch: bool
    healing: list[int]
    contributions: list[Contribution]


@dataclass(frozen=True, kw_only=True)
class Event(Row):
    id: int
    at: str | None
    level: str
    kind: str
    replica: int | None
    actor: str | None
    from_state: str
    to_state: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Alert(Row):
    """``closed_at`` is None while the alert is open."""

    id: int
    kind: str
    title: str
    subject: str
    replica: int | None
    level: str
    message: str
    first_at: str | None
    opened_at: str | None
    closed_at: str | None
    times: int
    acknowledged_at: str | None
    acknowledged_by: str | None


@dataclass(frozen=True, kw_only=True)
class LogLine(Row):
    id: int
    at: str | None
    replica: int
    level: str
    message: str


@dataclass(frozen=True, kw_only=True)
class View(Row):
    """A saved view of the list, ``/?q=…&sort=…&columns=…&differ=1&group=…``. Empty ``columns`` are
    the default columns; an empty ``group`` lists the runs."""

    id: int
    name: str
    owner: str
    mine: bool
    shared: bool
    query: str
    sort: str
    columns: list[str]
    differing: bool
    group: str


@dataclass(frozen=True, kw_only=True)
class RunView(Row):
    """A saved view of the run page, ``/runs/<id>/?panels=…&x=…&smooth=…&log=…&clip=…``. ``panels``
    lists those that differ from the usual ones: size ``s``, ``m`` or ``l`` after the name, ``!``
    pinned, ``-`` removed, ``m:`` an added metric. ``smooth`` and ``clip`` are null for the usual
    ones."""

    id: int
    name: str
    owner: str
    mine: bool
    shared: bool
    panels: str
    x: str
    smooth: float | None
    log: str
    clip: bool | None


@dataclass(frozen=True, kw_only=True)
class Me(Row):
    user: str
    role: str
    scopes: list[str]
    version: str


@dataclass(frozen=True, kw_only=True)
class Done(Row):
    """Result of an action. ``changed`` is false if there was nothing to do; ``state`` is the
    resulting state."""

    changed: bool
    state: str


@dataclass(frozen=True, kw_only=True)
class Scaled(Row):
    """``change`` is the number of replicas added to the pool (removed if negative)."""

    change: int
    wanted: int


@dataclass(frozen=True, kw_only=True)
class DeletedPart(Row):
    """Objects of one kind, such as ``checkpoint``, and their size."""

    kind: str
    objects: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class DeletionPlan(Row):
    """The effect of deleting a run together with its objects.

    ``kept_names`` are the first of the ``kept`` objects; ``whole`` is false if there are more
    objects than were listed; ``refusal`` is the reason why none would be deleted.
    """

    deleted: list[DeletedPart]
    objects: int
    size_bytes: int
    kept: int
    kept_bytes: int
    kept_names: list[str]
    whole: bool
    refusal: str
