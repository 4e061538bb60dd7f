"""Rows of the list of runs beside the runs themselves: groups, and completions of a query."""

from __future__ import annotations

from dataclasses import dataclass

from archipelago.rows import Row


@dataclass(frozen=True, kw_only=True)
class RunGroup(Row):
    """The runs of a list that share a tag, an owner, a sweep, a state or a backend.

    ``key`` is its value, or the id of a sweep; '' for runs without one. ``query`` finds the runs of
    the group in the list, '' if no query does. ``best_eval_loss`` is the lowest newest evaluation
    loss. ``others``: that many groups together. A cost or a rate that is not *known* is a lower
    bound.
    """

    key: str
    label: str
    query: str
    runs: int
    active: int
    failed: int
    tokens: int
    best_eval_loss: float | None
    cost_usd: float
    cost_known: bool
    usd_h: float
    usd_h_known: bool
    others: int


@dataclass(frozen=True, kw_only=True)
class RunGroups(Row):
    """Groups of the runs that match a query, the most expensive first. ``by`` is what they share.
    ``complete`` is false if only the newest runs were counted. A run with several tags or backends
    is in several groups."""

    by: str
    groups: list[RunGroup]
    total: RunGroup
    complete: bool


@dataclass(frozen=True, kw_only=True)
class BulkOutcome(Row):
    """Result of an action on several runs for one of them. ``refusal`` is the reason why the run
    was not changed; without one, ``changed`` is false if there was nothing to do."""

    id: str
    name: str
    state: str
    changed: bool
    refusal: str


@dataclass(frozen=True, kw_only=True)
class BulkResult(Row):
    results: list[BulkOutcome]


@dataclass(frozen=True, kw_only=True)
class Completion(Row):
    """``query`` is the query with its last term completed; ``runs`` is how many of the newest runs
    have the value, null if they were not counted."""

    label: str
    query: str
    help: str
    runs: int | None


@dataclass(frozen=True, kw_only=True)
class Completions(Row):
    completions: list[Completion]
