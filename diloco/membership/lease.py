"""Who is in the group: claiming an incarnation, keeping a lease, observing the others' leases.

The lease is one small object per incarnation, overwritten every interval by its one writer.
An observer judges it on its own monotonic clock by how long it has not changed (I5).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from diloco.clock import Clock
from diloco.errors import FencedOut
from diloco.protocol import keys
from diloco.protocol.parallel_reads import read_each
from diloco.protocol.reading import Damaged, read_record
from diloco.protocol.records import (
    ENDED_STATES,
    STEPPING_STATES,
    BadRecord,
    Beat,
    Command,
    Identity,
)
from diloco.store.base import (
    ListingTooLong,
    MissingKey,
    Store,
    StoreError,
    StoreUnavailable,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

DRAIN_WITHIN_S = 30.0
"""What a drain allows that does not say."""
LONGEST_REASON = 200
LIST_EVERY = 60
"""Looks for commands, one each heartbeat, between two that list them."""
LONGEST_GAP = 100
"""Missing numbers that are passed over at once. A number far beyond is not the server's: passing on
to it would hide the server's next commands."""

REPLICA = "replica"
SYNCER = "syncer"
"""Roles: a syncer reduces and commits, but trains nothing and is never waited for."""


def claim_incarnation(store: Store, replica: int, *, nonce: str) -> Identity:
    """A new incarnation of ``replica``, higher than that of any process which started before.

    The sequence number is taken by an atomic create, because a list can be stale and the first beat
    of a process that has died can arrive late. Without atomic create two processes that start at
    once can take one number; their nonces then decide.
    """
    seqs = [0]
    for info in store.list(keys.member(replica)):
        if beat := keys.parse_beat(info.key):
            seqs.append(keys.incarnation_seq(beat[1]))
        elif claim := keys.parse_claim(info.key):
            seqs.append(claim[1])
    seq = max(seqs) + 1
    while store.atomic_create and not store.create(keys.claim(replica, seq), nonce.encode()):
        seq += 1
    return Identity(replica=replica, incarnation=keys.incarnation(seq, nonce))


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What the lease says of the replica beside that it lives."""

    state: str = "syncing"
    round: int = 0
    step: int = 0
    tokens: int = 0
    loss: float | None = None
    message: str = ""
    blocked: int | None = None


PATIENCE_S = 900.0
"""How long a process that joins waits for a store that does not answer."""
PAUSE_S = 2.0


def patiently(
    operation: Callable[[], T], *, clock: Clock, check: Callable[[], None] = lambda: None
) -> T:
    """``operation()``, tried again while the store does not answer, for :data:`PATIENCE_S`."""
    give_up_s = clock.monotonic() + PATIENCE_S
    while True:
        try:
            return operation()
        except StoreUnavailable as error:
            if clock.monotonic() >= give_up_s:
                raise StoreUnavailable(
                    f"expected the store to answer within {PATIENCE_S:g} s of joining, "
                    f"last: {error}"
                ) from None
            log.warning("the store does not answer, will try again: %s", error)
            check()
            clock.sleep(PAUSE_S)


def _is_numbered(number: int, command: Command) -> bool:
    return command.n == number


class Lease:
    """The heartbeat: a thread that beats, watches for commands and for a newer incarnation.

    ``stop_requested``, ``fenced``, ``save_after`` (a checkpoint of a later round is wanted) and
    ``committer`` (who may create, on a store without an atomic create) are what it has learnt; the
    training loop looks at them. ``on_drain`` is told how many seconds there are and why. Commands
    that lie there when the lease starts are seen in :meth:`start`: a drain among them was meant for
    an earlier process, unless it names this one.
    A beat that cannot be written is logged and tried again at the next interval.
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        clock: Clock,
        interval_s: float,
        heartbeat_timeout_s: float,
        device: str,
        role: str = REPLICA,
        on_drain: Callable[[float, str], None] | None = None,
    ) -> None:
        if not 0 < interval_s < heartbeat_timeout_s:
            raise ValueError(
                f"heartbeat interval: expected more than 0 and less than the group's timeout of "
                f"{heartbeat_timeout_s:g} s, found {interval_s:g} s"
            )
        self.identity = identity
        self.stop_requested = False
        self.save_after: int | None = None
        self.fenced = False
        self.committer = 0
        self._store = store
        self._clock = clock
        self._interval_s = interval_s
        self._device = device
        self._role = role
        self._on_drain = on_drain
        self._started_wall_s = clock.wall()
        self._progress = Progress()
        self._count = 0
        self._longest_gap_s = heartbeat_timeout_s / 2
        self._beat_s, self._steady_s = clock.monotonic(), float("-inf")
        self._next_command = 1
        self._looks = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self, *, check: Callable[[], None] = lambda: None) -> None:
        """Write the first beat and start the thread.

        A store that does not answer is asked again for :data:`PATIENCE_S`; ``check`` is called
        meanwhile, and raises to leave. Raises :class:`StoreUnavailable`.
        """
        patiently(self.beat, clock=self._clock, check=check)
        patiently(lambda: self._read_commands(new=False), clock=self._clock, check=check)
        self._thread.start()

    def update(self, **changes: object) -> None:
        """Change what the next beat says, fields of :class:`Progress`."""
        with self._lock:
            self._progress = replace(self._progress, **changes)  # type: ignore[arg-type]

    @property
    def progress(self) -> Progress:
        return self._progress

    def beat(self) -> None:
        """Write the lease once."""
        with self._lock:
            self._count += 1
            progress = self._progress
            beat = Beat(
                replica=self.identity.replica,
                incarnation=self.identity.incarnation,
                count=self._count,
                interval_s=self._interval_s,
                role=self._role,
                started_wall_s=self._started_wall_s,
                wall_s=self._clock.wall(),
                host=socket.gethostname(),
                pid=os.getpid(),
                device=self._device,
                state=progress.state,
                round=progress.round,
                step=progress.step,
                tokens=progress.tokens,
                loss=progress.loss,
                message=progress.message,
                blocked=progress.blocked,
            )
        self._store.put(
            keys.beat(self.identity.replica, self.identity.incarnation), beat.to_bytes()
        )
        now_s = self._clock.monotonic()
        if now_s - self._beat_s > self._longest_gap_s:
            self._steady_s = now_s
        self._beat_s = now_s

    @property
    def steady_since_s(self) -> float:
        """Since when (monotonic) this process has written its lease without a long gap. A gap means
        that the store was away or this process paused: other leases must not be judged by it."""
        now_s = self._clock.monotonic()
        return now_s if now_s - self._beat_s > self._longest_gap_s else self._steady_s

    def look_around(self) -> None:
        """Read new commands, and look for a newer incarnation of this replica."""
        try:
            self._look_for_newer()
        except ListingTooLong as error:  # the command that ends the run must be read all the same
            log.error("newer processes of this replica cannot be seen: %s", error)
        self._read_commands()

    def _look_for_newer(self) -> None:
        for info in self._store.list(keys.member(self.identity.replica)):
            parsed = keys.parse_beat(info.key)
            if parsed and parsed[1] > self.identity.incarnation and not self.fenced:
                log.error("%s is fenced out by incarnation %s", self.identity, parsed[1])
                self.fenced = True

    def _read_commands(self, *, new: bool = True) -> None:
        """Obey the commands that follow the last one read. Their numbers have no gaps, but an
        object can be lost, so a number that is missing is not always the end: the folder is listed
        when the lease starts and at every :data:`LIST_EVERY`-th look."""
        listed = self._list_commands() if self._looks % LIST_EVERY == 0 else []
        self._looks += 1
        while True:
            number = self._next_command
            try:
                command = read_record(
                    self._store,
                    keys.control(number),
                    Command,
                    is_right=partial(_is_numbered, number),
                )
            except MissingKey:
                later = (n for n in listed if number < n <= number + LONGEST_GAP)
                self._next_command = min(later, default=number)
                if self._next_command == number:
                    break
                log.error("commands %d to %d are missing", number, self._next_command - 1)
                continue
            except Damaged as error:
                log.error("command %d is refused: %s", number, error)
                self._next_command += 1
                continue
            self._next_command += 1
            if command.replica in (None, self.identity.replica):
                self._obey(command, new=new)

    def _list_commands(self) -> list[int]:
        """The numbers below ``control/``."""
        try:
            found = [info.key for info in self._store.list(keys.CONTROL)]
        except ListingTooLong as error:
            log.error("commands after one that is missing cannot be seen: %s", error)
            return []
        return [number for key in found if (number := keys.parse_control(key)) is not None]

    def _obey(self, command: Command, *, new: bool) -> None:
        if command.command == "stop":
            log.info("told to stop by command %d", command.n)
            self.stop_requested = True
        elif command.command == "resume":
            log.info("command %d takes back the stops before it", command.n)
            self.stop_requested = False
        elif command.command == "save" and _is_round(command.arguments.get("round")):
            log.info("command %d wants a checkpoint", command.n)
            self.save_after = command.arguments["round"]
        elif command.command == "committer" and isinstance(command.arguments.get("replica"), int):
            self.committer = command.arguments["replica"]
            log.info("replica %d is named committer by command %d", self.committer, command.n)
        elif command.command == "drain" and self._on_drain is not None:
            self._drain(command, new=new)
        else:
            log.error("command %d is refused: unknown command %r", command.n, command.command)

    def _drain(self, command: Command, *, new: bool) -> None:
        assert self._on_drain is not None
        within_s = command.arguments.get("within_s", DRAIN_WITHIN_S)
        reason = command.arguments.get("reason", f"drained by command {command.n}")
        meant = command.arguments.get("incarnation", self.identity.incarnation if new else "")
        is_number = isinstance(within_s, int | float) and not isinstance(within_s, bool)
        if not is_number or not 0 <= within_s < float("inf"):
            log.error(
                "command %d is refused: within_s: expected seconds, found %r", command.n, within_s
            )
        elif not isinstance(meant, str) or not isinstance(reason, str):
            log.error(
                "command %d is refused: expected text for incarnation and reason, found %r and %r",
                command.n, meant, reason,
            )  # fmt: skip
        elif self.identity.incarnation <= meant:
            log.info("asked by command %d to leave within %g s: %s", command.n, within_s, reason)
            self._on_drain(float(within_s), reason[:LONGEST_REASON])

    def check_fence(self) -> None:
        """Raise :class:`FencedOut` if a newer process of this replica has been seen."""
        if self.fenced:
            raise FencedOut(f"a newer process of replica {self.identity.replica} has started")

    def end(self, state: str, message: str = "") -> None:
        """Write the last beat and stop the thread."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.update(state=state, message=message)
        if not self.fenced:
            self.beat()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self.look_around()
                if self.fenced:
                    return  # the lease is the newer process's
                self.beat()
            except StoreError as error:
                log.warning("heartbeat failed, will try again: %s", error)


def _is_round(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class _Seen:
    incarnation: str
    count: int
    since_s: float
    beat: Beat
    moved: bool
    """Whether it has changed before this observer's eyes, or come under them."""


class Observer:
    """Remembers when each lease last changed, on the observer's own clock.

    ``steady_since`` is :attr:`Lease.steady_since_s` of the observer's own process; with it, no
    process is taken for gone because of a time in which this one could not have seen it."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        timeout_s: float,
        steady_since: Callable[[], float] = lambda: float("-inf"),
    ) -> None:
        self._steady_since = steady_since
        self._store = store
        self._clock = clock
        self._timeout_s = timeout_s
        self._seen: dict[int, _Seen] = {}
        self._looked_s: float | None = None
        self._lock = threading.Lock()

    def look(self, *, skip: frozenset[int] = frozenset()) -> None:
        """Read the leases of all replicas but ``skip``: one list, one GET each. By any thread."""
        with self._lock:
            self._look(skip)

    def _look(self, skip: frozenset[int]) -> None:
        newest: dict[int, str] = {}
        for info in self._store.list(keys.MEMBERS):
            parsed = keys.parse_beat(info.key)
            if parsed and parsed[0] not in skip:
                newest[parsed[0]] = max(parsed[1], newest.get(parsed[0], ""))
        leases = {keys.beat(replica, newest[replica]): replica for replica in newest}
        for key, beat in read_each(self._store, Beat, list(leases)).items():
            replica, incarnation = leases[key], newest[leases[key]]
            own = (replica, incarnation)
            if isinstance(beat, Beat) and (beat.replica, beat.incarnation) != own:
                beat = BadRecord("expected the lease of its own key, found another's")
            if isinstance(beat, BadRecord):
                log.warning("lease of replica %d is refused: %s", replica, beat)
                continue
            seen = self._seen.get(replica)
            if seen is None or (seen.incarnation, seen.count) != (incarnation, beat.count):
                now_s, moved = self._clock.monotonic(), self._looked_s is not None
                self._seen[replica] = _Seen(incarnation, beat.count, now_s, beat, moved)
        self._looked_s = self._clock.monotonic()

    def live(self) -> frozenset[int]:
        """Replicas whose lease changed within the timeout and that have not left."""
        return self._alive(REPLICA)

    def syncers(self) -> frozenset[int]:
        """Live syncers, by replica number."""
        return self._alive(SYNCER)

    def _alive(self, role: str) -> frozenset[int]:
        now_s, steady_s = self._clock.monotonic(), self._steady_since()
        return frozenset(
            replica
            for replica, seen in list(self._seen.items())
            if seen.beat.state not in ENDED_STATES
            and seen.beat.role == role
            and now_s - max(seen.since_s, steady_s) < self._timeout_s
        )

    def blocked(self) -> dict[int, int]:
        """Live replica -> the committed round that it cannot read."""
        beats = {replica: self._seen[replica].beat for replica in self.live()}
        return {r: beat.blocked for r, beat in beats.items() if beat.blocked is not None}

    def ready_to_begin(self) -> frozenset[int]:
        """Replicas that :meth:`working_towards` the first round, their leases seen to change: to a
        newcomer a dead one's looks as good as any other until the timeout."""
        return frozenset(r for r in self.working_towards(1) if self._seen[r].moved)

    def begun(self) -> bool:
        """Whether any replica, alive or not, had come to its first inner step in its newest
        process, as far as this observer has looked."""
        beats = [seen.beat for seen in list(self._seen.values()) if seen.beat.role == REPLICA]
        return any(beat.step > 0 or beat.state in STEPPING_STATES for beat in beats)

    def is_gone(self, identity: Identity) -> bool:
        """Whether that process had ended, fallen silent or been followed by a newer one when this
        observer last looked; False for one whose lease it has not seen yet."""
        seen = self._seen.get(identity.replica)
        if seen is None or identity.incarnation > seen.incarnation:
            return False
        if identity.incarnation < seen.incarnation or seen.beat.state in ENDED_STATES:
            return True
        looked_s = self._looked_s
        since_s = max(seen.since_s, self._steady_since())
        return looked_s is not None and looked_s - since_s >= self._timeout_s

    def newer_process(self, identity: Identity) -> str:
        """The incarnation of that replica's newest process, if newer than this one; else ''."""
        seen = self._seen.get(identity.replica)
        return seen.incarnation if seen and seen.incarnation > identity.incarnation else ""

    def working_towards(self, round: int) -> frozenset[int]:
        """Live replicas that a round may wait for: those neither in a later one already nor still
        taking the group's state."""
        beats = {replica: self._seen[replica].beat for replica in self.live()}
        return frozenset(
            r for r, beat in beats.items() if beat.round <= round and beat.state != "syncing"
        )
