"""Reads the records of one round from the bucket. I/O only, no database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from diloco.protocol import keys
from diloco.protocol.packed_rounds import PackedRounds
from diloco.protocol.records import BadRecord, Commit, ContributionRecord, Plan, Record
from diloco.store.base import ListingTooLong, MissingKey, Store
from runs.ingest.validation import check_record

R = TypeVar("R", bound=Record)

CONTRIBUTIONS_LISTED = 20_000
"""Objects of a round that are listed; a group of a thousand replicas has two thousand. If there are
more, only the contributions that the plan names are read."""


@dataclass(frozen=True, kw_only=True)
class RoundRecords:
    """The records of one round; ``bad`` are those that could not be read."""

    number: int
    commit: Commit | None = None
    plan: Plan | None = None
    contributions: tuple[ContributionRecord, ...] = ()
    bad: tuple[tuple[str, BadRecord], ...] = ()
    commit_refused: str = ""


def read_round(
    store: Store, number: int, known: set[tuple[int, str]], replicas: frozenset[int]
) -> RoundRecords:
    """Read the records of one round, packed or not. I/O only, no database.

    ``known`` are contributions that were read before. ``replicas`` are those of the run; records of
    other replicas are ignored.
    """
    packs = store if isinstance(store, PackedRounds) else PackedRounds(store)
    store = packs
    bad: list[tuple[str, BadRecord]] = []
    commit = _get(store, keys.commit(number), Commit, bad)
    refused = str(bad[0][1]) if bad else ""
    if commit is not None and commit.round != number:
        refused = f"expected round {number}, found {commit.round}"
        bad.append((keys.commit(number), BadRecord(refused)))
        commit = None
    plan: Plan | None = None
    try:
        names = [i.key for i in store.list(keys.contributions(number), limit=CONTRIBUTIONS_LISTED)]
    except ListingTooLong as error:
        bad.append((keys.contributions(number), BadRecord(str(error))))
        plan = _get(store, keys.plan(number), Plan, bad)
        names = [
            keys.contribution_record(number, line.replica, line.incarnation)
            for line in (plan.contributions if plan is not None else ())
            if keys.is_incarnation(line.incarnation)
        ]
    is_closed = commit is not None or bool(refused)
    if is_closed and plan is None:
        plan = _get(store, keys.plan(number), Plan, bad)
    if is_closed and _lacks_deleted(plan, names, known, replicas):
        names = sorted({*names, *packs.packed_contributions(number)})
    # Sorted, so that the newest process of a replica that was relaunched during the round wins.
    listed = {
        parsed[1]: (parsed[2], key)
        for key in names
        if (parsed := keys.parse_contribution_record(key)) and parsed[1] in replicas
    }
    records: list[ContributionRecord] = []
    for replica, (incarnation, key) in listed.items():
        if (replica, incarnation) in known:
            continue
        record = _get(store, key, ContributionRecord, bad)
        if record is None:
            continue
        if (record.round, record.replica, record.incarnation) == (number, replica, incarnation):
            records.append(record)
        else:
            bad.append((key, BadRecord("expected a record of its own key, found another's")))
    if plan is None and listed and not is_closed:
        plan = _get(store, keys.plan(number), Plan, bad)
    return RoundRecords(
        number=number,
        commit=commit,
        plan=plan,
        contributions=tuple(records),
        bad=(*bad, *packs.take_refused()),
        commit_refused=refused,
    )


def _lacks_deleted(
    plan: Plan | None, names: list[str], known: set[tuple[int, str]], replicas: frozenset[int]
) -> bool:
    """Return whether a record that the plan names, or that was read before, is not listed: the
    records of an old round are deleted after it was packed, those that the plan names first."""
    listed = {parsed[1:] for key in names if (parsed := keys.parse_contribution_record(key))}
    planned = {
        (line.replica, line.incarnation)
        for line in (plan.contributions if plan is not None else ())
        if line.replica in replicas
    }
    read = {(replica, name) for replica, name in known if keys.is_incarnation(name)}
    return not listed or bool((planned | read) - listed)


def _get(store: Store, key: str, kind: type[R], bad: list[tuple[str, BadRecord]]) -> R | None:
    try:
        record = kind.read(store, key)
        check_record(record)
        return record
    except MissingKey:
        return None
    except BadRecord as error:
        bad.append((key, error))
        return None
