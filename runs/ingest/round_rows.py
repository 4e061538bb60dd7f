"""The columns of a round and of its contributions, computed from its records. No database.

Live ingest (:mod:`runs.ingest.rounds`) and import (:mod:`runs.restore.round_import`) store them, so
that both result in the same rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any

from diloco.protocol import keys
from diloco.protocol.records import Commit, Plan
from runs.ingest.limits import finite
from runs.ingest.round_reader import RoundRecords
from runs.ingest.validation import wall
from runs.redaction import clean_text
from runs.states import ContributionState, RoundState

REFUSALS_NAMED = 20
"""Events per round about refused contributions. A plan of one megabyte can name ten thousand."""
LATE = {"state": ContributionState.LATE, "reason": "uploaded after the plan"}
"""Columns of a contribution that neither the plan nor the commit of its round names."""

Columns = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Put:
    """Columns to set on the contribution of one replica."""

    replica: int
    columns: Columns


@dataclass(frozen=True, kw_only=True)
class Warned:
    """A warning event about a round, of bounded length; ``replica`` is the number of the replica
    that it names."""

    kind: str
    message: str
    replica: int | None = None


def plan_columns(plan: Plan, now: datetime) -> Columns:
    return {"mode": clean_text(plan.mode, 16), "planned_at": wall(plan.wall_s, now)}


def closed_columns(records: RoundRecords, now: datetime) -> Columns:
    """The columns of a round with a commit, or with one that was refused."""
    commit, plan = records.commit, records.plan
    columns: Columns = {"state": RoundState.VOID, "reason": ""}
    if commit is None:
        columns["reason"] = clean_text(f"commit refused: {records.commit_refused}")
    else:
        columns |= {
            "fragment": commit.fragment,
            "contributors": len(commit.contributors),
            "tokens_total": commit.tokens_total,
            "loss": _round_loss(commit, plan),
            "committed_at": wall(commit.wall_s, now),
        }
        if commit.void:
            columns |= {"reason": clean_text(commit.void), "contributors": 0}
        else:
            columns["state"] = RoundState.COMMITTED
    return columns | (plan_columns(plan, now) if plan is not None else {})


def record_puts(records: RoundRecords, now: datetime) -> Iterator[Put]:
    """The contribution records, before or after the round was closed."""
    for record in records.contributions:
        yield _put(
            record.replica,
            record.incarnation,
            base_round=record.base_round,
            tokens=record.tokens,
            steps=record.steps,
            loss=finite(record.loss),
            norm=finite(record.norm),
            size_bytes=record.size_bytes,
            uploaded_at=wall(record.wall_s, now),
        )


def outcome_puts(records: RoundRecords) -> Iterator[Put]:
    """The outcomes of a closed round: included, refused or late for each planned contribution."""
    commit, plan = records.commit, records.plan
    contributors = commit.contributors if commit and not commit.void else ()
    included = {identity.replica: identity.incarnation for identity in contributors}
    planned_replicas = {c.replica for c in plan.contributions} if plan else set()
    for planned in plan.contributions if plan else ():
        if planned.replica in included:
            state, reason = ContributionState.INCLUDED, ""
        elif commit and commit.void_replica == planned.replica:
            state, reason = ContributionState.REFUSED, clean_text(commit.void)
        else:
            state, reason = ContributionState.LATE, "the round is void"
        yield _put(
            planned.replica,
            planned.incarnation,
            state=state,
            reason=reason,
            weight=finite(planned.weight) or 0.0,
            tokens=planned.tokens,
            steps=planned.steps,
            loss=finite(planned.loss),
            size_bytes=planned.size_bytes,
        )
    for replica in included.keys() - planned_replicas:
        # The plan was unreadable; only the commit names the contributors.
        yield _put(replica, included[replica], state=ContributionState.INCLUDED)
    for refusal in plan.refused if plan else ():
        yield _put(
            refusal.replica,
            refusal.incarnation,
            state=ContributionState.REFUSED,
            reason=clean_text(refusal.reason),
        )


def refusal_puts(records: RoundRecords) -> Iterator[Put]:
    """The contributions whose record could not be read."""
    for key, error in records.bad:
        if parsed := keys.parse_contribution_record(key):
            reason = clean_text(str(error))
            yield _put(*parsed[1:3], state=ContributionState.REFUSED, reason=reason)


def new_contributions(
    records: RoundRecords, replicas: Collection[int], now: datetime
) -> dict[int, Columns]:
    """The columns of all contributions of a closed round that has no rows yet, by replica.
    Replicas that the run lacks are ignored."""
    merged: dict[int, Columns] = {}
    for put in chain(record_puts(records, now), outcome_puts(records)):
        merged.setdefault(put.replica, {}).update(put.columns)
    for columns in merged.values():
        if "state" not in columns:
            columns |= LATE
    for put in refusal_puts(records):
        merged.setdefault(put.replica, {}).update(put.columns)
    return {replica: columns for replica, columns in merged.items() if replica in replicas}


def warnings(records: RoundRecords, columns: Columns) -> Iterator[Warned]:
    """Events about a closed round, whose columns are ``columns``: it is void, or contributions were
    refused."""
    about = f"round {records.number}"
    if columns["state"] == RoundState.VOID:
        void_replica = records.commit.void_replica if records.commit else None
        message = f"{about} is void: {columns['reason']}"
        yield Warned(kind="round_void", message=message, replica=void_replica)
    refused = records.plan.refused if records.plan else ()
    kind = "contribution_refused"
    if len(refused) > REFUSALS_NAMED:
        yield Warned(
            kind=kind,
            message=f"{about}: {len(refused)} contributions refused; the first {REFUSALS_NAMED} "
            "are listed",
        )
    for one in refused[:REFUSALS_NAMED]:
        reason = clean_text(one.reason)
        message = f"{about}: contribution of replica {one.replica} refused: {reason}"
        yield Warned(kind=kind, message=message, replica=one.replica)


def _put(replica: int, incarnation: str, **columns: Any) -> Put:
    return Put(replica=replica, columns={"incarnation": clean_text(incarnation, 16), **columns})


def _round_loss(commit: Commit, plan: Plan | None) -> float | None:
    """The commit's loss, or else the mean of the plan's losses weighted by tokens."""
    if commit.loss is not None or plan is None:
        return finite(commit.loss)
    tokens = sum(c.tokens for c in plan.contributions)
    if not tokens:
        return None
    return finite(sum(c.loss * c.tokens for c in plan.contributions) / tokens)
