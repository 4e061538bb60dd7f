"""Reads and extends the chains of work units (:mod:`diloco.data.unit_records`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from diloco.data.unit_records import (
    CLAIM,
    CONTRIBUTION,
    LINKS,
    HeldUnits,
    Ranges,
    UnitLink,
    UnitPlan,
    merged,
)
from diloco.errors import ReplicaError
from diloco.protocol import keys
from diloco.protocol.reading import read_record
from diloco.protocol.records import BadRecord, Commit, Identity
from diloco.store.base import ListingTooLong, MissingKey, Store, exists

log = logging.getLogger(__name__)


class IsGone(Protocol):
    """Returns whether a process has ended, or its lease has expired, or a newer one replaces it."""

    def __call__(self, process: Identity) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class ChainState:
    """The state of a unit: its newest holder, the next link's number, the samples that are seen,
    and whether the newest contribution's round is undecided."""

    holder: Identity | None
    next_seq: int
    seen: Ranges
    is_undecided: bool


class UnitLog:
    """The chains of one group. ``store`` is that of the rendezvous."""

    def __init__(self, store: Store, identity: Identity) -> None:
        if not store.atomic_create:
            raise ReplicaError(
                f"work units need a store with conditional writes, found {store.uri}. Cover the "
                "data by replica number instead"
            )
        self._store = store
        self.identity = identity
        self._decided: dict[int, Commit] = {}

    def agree(self, plan: UnitPlan) -> None:
        """Record the division of epochs, or check that the recorded one is the same. Raises
        :class:`~diloco.errors.ReplicaError`."""
        self._store.create(keys.unit_plan(), plan.to_bytes())
        found = read_record(self._store, keys.unit_plan(), UnitPlan)
        if found != plan:
            raise ReplicaError(
                f"expected the work units of {found}, found {plan}: all replicas of a run need the "
                "same shards, context and seed"
            )

    # -- writing ---------------------------------------------------------------------------------

    def claim(self, epoch: int, unit: int, seq: int) -> bool:
        """Add a claim; return whether this process is the holder now."""
        return self._add(
            UnitLink(epoch=epoch, unit=unit, seq=seq, kind=CLAIM, writer=self.identity)
        )

    def contribute(self, epoch: int, unit: int, seq: int, *, round: int, ranges: Ranges) -> bool:
        """Add a contribution; return False if another process has become the holder."""
        starts, ends = (tuple(pair[n] for pair in ranges) for n in (0, 1))
        return self._add(
            UnitLink(
                epoch=epoch,
                unit=unit,
                seq=seq,
                kind=CONTRIBUTION,
                writer=self.identity,
                round=round,
                starts=starts,
                ends=ends,
            )
        )

    def _add(self, link: UnitLink) -> bool:
        if link.seq >= LINKS:
            raise ReplicaError(
                f"work unit {link.unit} of epoch {link.epoch}: expected at most {LINKS} links"
            )
        key = keys.unit_link(link.epoch, link.unit, link.seq)
        return self._store.create(key, link.to_bytes())

    def put_held(self, held: list[tuple[int, int]]) -> None:
        """Replace the list of units of this process."""
        record = HeldUnits(
            writer=self.identity,
            epochs=tuple(epoch for epoch, _ in held),
            units=tuple(unit for _, unit in held),
        )
        self._store.put(self._held_key(self.identity), record.to_bytes())

    def delete_held(self, process: Identity) -> None:
        self._store.delete([self._held_key(process)])

    def _held_key(self, process: Identity) -> str:
        return keys.held_units(process.replica, process.incarnation)

    # -- reading ---------------------------------------------------------------------------------

    def is_claimed(self, epoch: int, unit: int) -> bool:
        return exists(self._store, keys.unit_link(epoch, unit, 0))

    def state_of(self, epoch: int, unit: int) -> ChainState:
        """Read the chain of a unit: one list, and one GET for each link and round. Raises
        :class:`BadRecord` for a damaged link."""
        links = self._links(epoch, unit)
        newest = {
            (link.round, link.writer): link.ranges for link in links if link.kind == CONTRIBUTION
        }
        seen = [
            pair
            for (round, writer), ranges in newest.items()
            if self.includes(round, writer)
            for pair in ranges
        ]
        last = links[-1] if links else None
        undecided = any(not self.is_decided(round) for round, _ in newest)
        return ChainState(
            holder=last.writer if last else None,
            next_seq=last.seq + 1 if last else 0,
            seen=merged(seen),
            is_undecided=undecided,
        )

    def _links(self, epoch: int, unit: int) -> list[UnitLink]:
        """Return the links of a chain. Raises :class:`BadRecord` for a damaged one."""
        links: list[UnitLink] = []
        for info in self._store.list(keys.unit(epoch, unit), limit=LINKS):
            place = keys.parse_unit_link(info.key)
            if place is None:
                continue
            is_right = partial(_is_at, place)
            links.append(read_record(self._store, info.key, UnitLink, is_right=is_right))
        return links

    def includes(self, round: int, process: Identity) -> bool:
        """Return whether a round is committed with the contribution of a process."""
        commit = self._commit(round)
        return commit is not None and not commit.void and process in commit.contributors

    def is_decided(self, round: int) -> bool:
        return self._commit(round) is not None

    def _commit(self, round: int) -> Commit | None:
        if round not in self._decided:
            try:
                self._decided[round] = read_record(
                    self._store, keys.commit(round), Commit, is_right=lambda c: c.round == round
                )
            except MissingKey:
                return None
        return self._decided[round]

    def held_by_others(self) -> list[Identity]:
        """Return the other processes that have a list of units: one list."""
        try:
            listed = self._store.list(keys.HELD_UNITS)
        except ListingTooLong as error:
            log.warning("work units of processes that are gone are not looked for: %s", error)
            return []
        found = [keys.parse_held_units(info.key) for info in listed]
        processes = [Identity(replica=p[0], incarnation=p[1]) for p in found if p]
        return [process for process in processes if process != self.identity]

    def held_of(self, process: Identity) -> list[tuple[int, int]]:
        """Return the units in the list of a process; none if it is damaged or deleted."""
        try:
            held = read_record(self._store, self._held_key(process), HeldUnits)
        except (MissingKey, BadRecord) as error:
            log.warning("the list of work units of %s is refused: %s", process, error)
            return []
        return list(zip(held.epochs, held.units, strict=False))


def _is_at(place: tuple[int, int, int], link: UnitLink) -> bool:
    return (link.epoch, link.unit, link.seq) == place
