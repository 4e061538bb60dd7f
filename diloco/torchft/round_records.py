"""The records of the Manager's rounds in the store: quorums, decisions and the oldest kept round.

Records are immutable and created at most once. Quorum numbers have no gaps from the oldest kept
round on. The keys are in :mod:`diloco.protocol.manager_keys`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeVar

from diloco.protocol import manager_keys
from diloco.protocol.manager_records import CommitDecision, Floor, Name, Quorum
from diloco.protocol.records import BadRecord, Identity, Record
from diloco.store.base import MissingKey, Store

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)

KEPT_ROUNDS = 500
"""Minimum number of rounds whose quorums and commits are kept."""
SWEEP_ROUNDS_EVERY = 50
"""Older records are deleted once per this many rounds."""


class RoundRecords:
    """The records, as read and written by the process ``me``."""

    def __init__(self, store: Store, me: Identity) -> None:
        self._store = store
        self._me = me

    def find(self, key: str, kind: type[R]) -> R | None:
        """Read a record; return None if there is none."""
        try:
            return kind.read(self._store, key)
        except MissingKey:
            return None

    def quorum(self, n: int) -> Quorum | None:
        """Return the quorum of round ``n``, if it has been formed."""
        return self.find(manager_keys.quorum(n), Quorum)

    def read_new(self, prefix: str, kind: type[R], seen: dict[str, R]) -> None:
        """Add the records below ``prefix`` to ``seen``, by key; invalid ones are logged."""
        for info in self._store.list(prefix):
            if info.key in seen:
                continue
            try:
                record = self.find(info.key, kind)
            except BadRecord as error:
                log.warning("%s is refused: %s", info.key, error)
                continue
            if record is not None:
                seen[info.key] = record

    def newest_quorum(self, n: int) -> int:
        """Return the number of the newest quorum, at least ``n``: an exponential search, then a
        binary search."""
        if self.quorum(n + 1) is None:
            return n
        newest, step = n + 1, 2
        while self.quorum(n + step) is not None:
            newest, step = n + step, 2 * step
        missing = n + step
        while missing - newest > 1:
            middle = (newest + missing) // 2
            if self.quorum(middle) is not None:
                newest = middle
            else:
                missing = middle
        return newest

    def decisions(self, n: int) -> list[CommitDecision]:
        """Return the decisions of round ``n``, in order."""
        decisions: list[CommitDecision] = []
        while decision := self.find(manager_keys.commit(n, len(decisions)), CommitDecision):
            decisions.append(decision)
        return decisions

    def close(self, n: int) -> bool:
        """Prevent further commits in round ``n``; return whether the round has a commit."""
        while True:
            decisions = self.decisions(n)
            if not (decisions and decisions[-1].closed):
                c = len(decisions)
                closing = CommitDecision(n=n, c=c, included=(), writer=self._me, closed=True)
                if not self._store.create(manager_keys.commit(n, c), closing.to_bytes()):
                    continue
            return any(decision.committed for decision in decisions)

    def oldest_kept(self) -> int:
        """Return the oldest round whose records are kept."""
        floor = self.find(manager_keys.FLOOR, Floor)
        return floor.n if floor else 1

    def sweep(self, n: int) -> None:
        """Delete the payloads of all rounds up to ``n``, which every member has left; every
        :data:`SWEEP_ROUNDS_EVERY` rounds also the records of old rounds."""
        self._delete_up_to(n, manager_keys.ROUNDS)
        if n % SWEEP_ROUNDS_EVERY == 0 and (last := n - KEPT_ROUNDS) > 0:
            self._store.put(manager_keys.FLOOR, Floor(n=last + 1).to_bytes())
            for prefix in (manager_keys.COMMITS, manager_keys.QUORUMS):
                self._delete_up_to(last, prefix)

    def _delete_up_to(self, n: int, prefix: str) -> None:
        stored: Iterable[str] = [info.key for info in self._store.list(prefix)]
        old = [key for key in stored if (of := manager_keys.round_of(key)) is not None and of <= n]
        if old:
            self._store.delete(old)


def claim_number(store: Store, *, replica_id: str, rank: int, nonce: str) -> int:
    """Return the member number of a rank of a replica: its earlier number, or the next free one."""
    number = 1
    while True:
        own = Name(number=number, replica_id=replica_id, rank=rank, nonce=nonce)
        try:
            owner = Name.read(store, manager_keys.name(number))
        except MissingKey:
            if store.create(manager_keys.name(number), own.to_bytes()):
                return number
            continue
        if (owner.replica_id, owner.rank) == (replica_id, rank):
            return number
        number += 1
