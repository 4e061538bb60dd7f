"""Groups of the runs list with totals: by tag, owner, sweep, state or backend.

The values are read and summed up here, because tags are lists. A constant number of queries.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import Count, Sum

from archipelago.list_rows import RunGroup
from executors.registry import BACKENDS
from runs.json_values import finite, least, row_of, texts
from runs.models import ReplicaPool, Run, Sweep
from runs.permissions import can_view
from runs.queries import rates
from runs.queries.search import Term, matching, quoted
from runs.states import RUN_ACTIVE, RunState

BY = {"tag": "Tag", "owner": "Owner", "sweep": "Sweep", "state": "State", "backend": "Backend"}
"""Properties that runs are grouped by, and their labels."""
MOST_RUNS = 20_000
"""Matching runs that are counted, the newest first."""
GROUPS = 50
"""Groups before the rest is summed up in one row."""
AT_ONCE = 10_000
"""Parameters of one query."""
_OTHERS = {"tag": "no tag", "sweep": "no sweep"}
_COLUMNS = ("pk", "state", "tokens", "eval_loss", "cost_usd", "owner__username", "tags", "sweep")


@dataclass(kw_only=True)
class _Group:
    key: str = ""
    runs: int = 0
    active: int = 0
    failed: int = 0
    tokens: int = 0
    best_eval_loss: float | None = None
    cost_usd: float = 0.0
    cost_known: bool = True
    usd_h: float = 0.0
    usd_h_known: bool = True
    others: int = 0

    def add(self, run: _Row, rate: tuple[float, bool]) -> None:
        self.runs += 1
        self.active += run.state in RUN_ACTIVE
        self.failed += run.state == RunState.FAILED
        self.tokens += run.tokens
        self.best_eval_loss = least(self.best_eval_loss, run.eval_loss)
        self.cost_usd += run.cost_usd
        self.cost_known &= run.cost_known
        self.usd_h += rate[0]
        self.usd_h_known &= rate[1]

    def join(self, other: _Group) -> None:
        """Add another group to the row of the remaining ones."""
        for name in ("runs", "active", "failed", "tokens", "cost_usd", "usd_h"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.best_eval_loss = least(self.best_eval_loss, other.best_eval_loss)
        self.cost_known &= other.cost_known
        self.usd_h_known &= other.usd_h_known
        self.others += 1


@dataclass(frozen=True, slots=True)
class _Row:
    state: str
    tokens: int
    eval_loss: float | None
    cost_usd: float
    cost_known: bool


def groups(
    user: AbstractBaseUser | AnonymousUser,
    terms: Sequence[Term],
    by: str,
    *,
    limit: int = GROUPS,
) -> dict[str, Any]:
    """The row of :class:`archipelago.list_rows.RunGroups`; ``by`` is one of :data:`BY`."""
    runs = matching(Run.objects.order_by("-created_at", "-id"), terms, user=user)
    rows = list(runs.values_list(*_COLUMNS)[: MOST_RUNS + 1]) if can_view(user) else []
    complete, rows = len(rows) <= MOST_RUNS, rows[:MOST_RUNS]
    ids = [row[0] for row in rows]
    rate, unpriced, keys = _rates(), _unpriced(), _keys(by, rows, ids)
    found: dict[str, _Group] = {}
    total = _Group()
    for pk, state, tokens, eval_loss, cost, *_ in rows:
        run = _Row(state, tokens, finite(eval_loss), finite(cost) or 0.0, pk not in unpriced)
        for key in dict.fromkeys(keys[pk]) or ("",):
            found.setdefault(key, _Group(key=key)).add(run, rate.get(pk, (0.0, True)))
        total.add(run, rate.get(pk, (0.0, True)))
    order = sorted(found.values(), key=lambda g: (-g.cost_usd, -g.runs, g.key))
    labels = _labels(by, [group.key for group in order])
    listed = [_row(group, by, labels) for group in order[:limit]]
    if rest := order[limit:]:
        joined = _Group()
        for group in rest:
            joined.join(group)
        listed.append(_row(joined, by, {"": ""}))
    return {
        "by": by,
        "groups": listed,
        "total": _row(total, "", {"": "All"}),
        "complete": complete,
    }


def _rates() -> dict[uuid.UUID, tuple[float, bool]]:
    """Cost of each run an hour, and whether all its prices are known."""
    rows = rates.running_jobs().values_list("replica__run")
    counted = rows.annotate(sum=Sum("price_usd_h"), jobs=Count("pk"), priced=Count("price_usd_h"))
    return {run: (finite(usd) or 0.0, jobs == priced) for run, usd, jobs, priced in counted}


def _unpriced() -> set[uuid.UUID]:
    return set(rates.unpriced_attempts().values_list("replica__run", flat=True).distinct())


def _keys(by: str, rows: list[Any], ids: list[uuid.UUID]) -> dict[uuid.UUID, list[str]]:
    """The groups of each run."""
    if by == "backend":
        keys: dict[uuid.UUID, list[str]] = {pk: [] for pk in ids}
        for run, backend in _pools(ids):
            keys[run].append(backend)
        return keys
    place = _COLUMNS.index({"owner": "owner__username", "tag": "tags"}.get(by, by))
    if by == "tag":
        return {row[0]: texts(row[place]) for row in rows}
    return {row[0]: [str(row[place])] if row[place] else [] for row in rows}


def _pools(ids: list[uuid.UUID]) -> Iterator[tuple[uuid.UUID, str]]:
    for at in range(0, len(ids), AT_ONCE):
        pools = ReplicaPool.objects.filter(run__in=ids[at : at + AT_ONCE]).order_by("id")
        yield from pools.values_list("run", "backend")


def _labels(by: str, keys: Iterable[str]) -> dict[str, str]:
    labels = {key: key for key in keys} | {"": _OTHERS.get(by, "none")}
    if by == "backend":
        labels |= {key: BACKENDS.get(key, key) for key in labels if key}
    if by == "sweep":
        names = Sweep.objects.filter(pk__in=[key for key in labels if key][:AT_ONCE])
        labels |= {str(pk): name for pk, name in names.values_list("pk", "name")}
    return labels


def _row(group: _Group, by: str, labels: dict[str, str]) -> dict[str, Any]:
    query = f"{by}:{quoted(group.key)}" if group.key else ""
    return row_of(RunGroup, group, label=labels[group.key], query=query)
