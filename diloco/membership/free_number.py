"""Choose the replica number of a process that was started without one.

The process takes the lowest number whose owner has ended or is dead, so that the saved state of
that replica is resumed; without such a number, the lowest one that was never used. A number counts
as in use once its lease or claim has changed while this process observed it, and its owner as dead
once nothing has changed for the heartbeat timeout, which begins again, twice at most, after a gap
in which the store did not answer or this process was suspended: an owner cannot write in an outage
either. Until each used number is one or the other, the process waits: a new replica of a running
group for about one heartbeat.

The number is taken by creating the claim of its next incarnation, which only one process can do. A
process that loses goes on with another number and never claims the incarnation after the winner's,
which would fence out the winner. An owner that was only suspended is fenced out as by a restart
under its number.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from diloco.clock import Clock
from diloco.errors import ReplicaError
from diloco.membership.lease import claim_incarnation
from diloco.membership.observer import Gaps, Observer
from diloco.protocol import keys
from diloco.protocol.records import Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store

log = logging.getLogger(__name__)

POLL_S = 0.5
LAST_SEQ = 99_999
"""The largest sequence number of an incarnation."""


@dataclass(frozen=True)
class _Claimed:
    """The newest incarnation of a number, ``since_s`` when it is known, after how many ``gaps`` of
    this process. ``appeared``: it was claimed while it was observed."""

    seq: int
    since_s: float
    gaps: int
    appeared: bool


class _State(Enum):
    """State of the owner of a number, as far as it has been observed."""

    FREE = "ended or dead"
    UNDECIDED = "no change yet"
    IN_USE = "alive"


def claim_process(
    store: Store,
    settings: GroupSettings,
    number: int | None,
    *,
    clock: Clock,
    report: Callable[[str], None] = lambda message: None,
) -> Identity:
    """Claim an incarnation of the replica ``number``; None: of a number that no live process has.

    Raises :class:`ReplicaError` for a number that the group does not have, and as
    :func:`claim_free_number`.
    """
    nonce = secrets.token_hex(4)
    if number is None:
        return claim_free_number(store, settings, nonce=nonce, clock=clock, report=report)
    if not 0 <= number < settings.max_replicas:
        raise ReplicaError(
            f"replica: expected a replica number from 0 to {settings.max_replicas - 1}, found "
            f"{number}. Enter one of these, or none to take a free one"
        )
    return claim_incarnation(store, number, nonce=nonce)


def claim_free_number(
    store: Store,
    settings: GroupSettings,
    *,
    nonce: str,
    clock: Clock,
    report: Callable[[str], None] = lambda message: None,
) -> Identity:
    """Claim a replica number that no live process has, and its next incarnation.

    ``report`` is called with what the process waits for. Raises :class:`ReplicaError` if all
    numbers below ``max_replicas`` are in use, or if the store has no atomic create.
    """
    if not store.atomic_create:
        raise ReplicaError(
            f"replica: expected a number, found none, and {store.uri} has no conditional writes to "
            "choose one safely. Pass replica= or set REPLICA_RANK, with another number for each "
            "replica"
        )
    watch = _Watch(store, settings, clock)
    reported = False
    while True:
        states = watch.look()
        free = [number for number, state in states.items() if state is _State.FREE]
        undecided = [number for number, state in states.items() if state is _State.UNDECIDED]
        if not undecided:
            free += watch.unused()
        for number in free:
            if identity := watch.claim(number, nonce):
                return identity
        if not undecided:
            raise ReplicaError(
                f"replica: expected a free number below max_replicas, found all "
                f"{settings.max_replicas} in use by replicas of {store.uri}. Stop one, or start a "
                "group with a larger max_replicas under another URI"
            )
        if not reported:
            reported = True
            report(
                f"checking the leases of other replicas for up to {settings.heartbeat_timeout_s:g}"
                f" s, to take a free number: {', '.join(map(str, undecided))}"
            )
        watch.ask(undecided)
        clock.sleep(POLL_S)


class _Watch:
    """Observes the claims and leases of all numbers on this process's clock."""

    def __init__(self, store: Store, settings: GroupSettings, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._timeout_s = settings.heartbeat_timeout_s
        self._numbers = range(settings.max_replicas)
        self._looked_s, self._gaps = clock.monotonic(), Gaps()
        self._observer = Observer(
            store, clock=clock, timeout_s=self._timeout_s, gaps=lambda: self._gaps
        )
        self._claimed: dict[int, _Claimed] = {}
        self._has_looked = False

    def look(self) -> dict[int, _State]:
        """Read all claims and leases: two lists, and one GET for each lease. Return the states of
        the numbers that were ever used, in their order."""
        self._note_gap()
        for info in self._store.list(keys.MEMBERS):
            if claim := keys.parse_claim(info.key):
                self._note(*claim)
            elif beat := keys.parse_beat(info.key):
                self._note(beat[0], keys.incarnation_seq(beat[1]))
        self._has_looked = True
        self._observer.look()
        self._note_gap()
        return {number: self._state(number) for number in sorted(self._claimed)}

    def _note_gap(self) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._looked_s > self._timeout_s / 2:
            self._gaps = Gaps(self._gaps.count + 1, now_s)
        self._looked_s = now_s

    def _note(self, number: int, seq: int) -> None:
        known = self._claimed.get(number)
        if number in self._numbers and (known is None or seq > known.seq):
            self._claimed[number] = _Claimed(
                seq, self._clock.monotonic(), self._gaps.count, self._has_looked
            )

    def _state(self, number: int) -> _State:
        claimed, process = self._claimed[number], self._observer.newest_process(number)
        has_lease = process and keys.incarnation_seq(process.incarnation) == claimed.seq
        if process and has_lease and self._observer.is_gone(process):
            return _State.FREE
        if claimed.appeared or (has_lease and self._observer.has_changed(number)):
            return _State.IN_USE
        since_s = self._gaps.silent_since_s(claimed.since_s, count=claimed.gaps)
        is_silent = self._looked_s - since_s >= self._timeout_s
        return _State.FREE if is_silent and not has_lease else _State.UNDECIDED

    def ask(self, undecided: list[int]) -> None:
        """Ask the replicas that are calm for frequent heartbeats."""
        self._observer.ask(undecided)

    def unused(self) -> list[int]:
        return [number for number in self._numbers if number not in self._claimed]

    def claim(self, number: int, nonce: str) -> Identity | None:
        """Claim the next incarnation of a number; None if another process has claimed it."""
        known = self._claimed.get(number)
        seq = known.seq + 1 if known else 1
        if seq > LAST_SEQ:
            return None
        if self._store.create(keys.claim(number, seq), nonce.encode()):
            log.info("takes the replica number %d, incarnation %d", number, seq)
            return Identity(replica=number, incarnation=keys.incarnation(seq, nonce))
        self._claimed[number] = _Claimed(
            seq, self._clock.monotonic(), self._gaps.count, appeared=True
        )
        return None
