"""Membership by leases: claim an incarnation, keep a lease, read the server's commands.

A lease is a small object per incarnation that its only writer overwrites every interval. Other
processes watch it (:mod:`diloco.membership.observer`).
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
from diloco.membership.observer import REPLICA, Gaps
from diloco.protocol import keys
from diloco.protocol.control_pace import (
    CALM_CHECK_EVERY,
    CHECK_EVERY,
    SUSPECTED_SHARE,
    awaited_looks,
    calm_interval_s,
    calm_looks_per_read,
    looks_per_beat,
)
from diloco.protocol.reading import Damaged, read_record
from diloco.protocol.records import (
    AWAITED_STATE,
    CALM_STATES,
    ENDED_STATES,
    Command,
    Heartbeat,
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
"""Default time of a ``drain`` command."""
LONGEST_REASON = 200
LIST_EVERY = 60
"""Reads of the commands between two listings of them."""
CHECKS_PER_LIST = 20
"""Checks for a newer process between two listings of this replica's processes."""
LONGEST_GAP = 100
"""Maximum number of consecutive missing commands that are skipped. The server does not write
numbers beyond such a gap; skipping to one would hide the server's next commands."""


def claim_incarnation(store: Store, replica: int, *, nonce: str) -> Identity:
    """Claim an incarnation of ``replica`` higher than those of all earlier processes.

    The sequence number is claimed by an atomic create, because listings can be stale and the first
    heartbeat of a dead process can arrive late. Without atomic create, two processes that start
    together can claim one number; then their nonces decide.
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
    """The fields of a heartbeat that describe the progress of a replica. ``calm``: it needs few
    heartbeats while no process asks for more, unless ``is_short_round``. ``ends_s``: monotonic time
    at which it will probably have computed its steps."""

    calm: bool = False
    is_short_round: bool = False
    ends_s: float = 0.0
    state: str = "syncing"
    round: int = 0
    step: int = 0
    tokens: int = 0
    loss: float | None = None
    message: str = ""
    blocked: int | None = None


PATIENCE_S = 900.0
"""For how long a joining process waits for an unavailable store."""
PAUSE_S = 2.0


def patiently(
    operation: Callable[[], T], *, clock: Clock, check: Callable[[], None] = lambda: None
) -> T:
    """Call ``operation`` and return its result; retry for :data:`PATIENCE_S` while the store is
    unavailable. ``check`` is called before each retry. Raises :class:`StoreUnavailable`."""
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
            log.warning("the store is unavailable, will retry: %s", error)
            check()
            clock.sleep(PAUSE_S)


def _has_number(number: int, command: Command) -> bool:
    return command.n == number


class Lease:
    """The lease of this process: a thread that writes heartbeats, reads commands and checks for a
    newer incarnation.

    The training loop reads the results: ``stop_requested``, ``fenced``, ``save_after`` (a ``save``
    command requires a checkpoint of a later round) and ``committer`` (the only replica that can
    create objects, on a store without atomic create). ``on_drain`` is called with the seconds and
    the reason of a ``drain`` command. :meth:`start` reads the commands that exist already; a drain
    among them is for an earlier process unless it names this incarnation.

    A heartbeat that cannot be written is logged and retried at the next interval. While the
    progress is *calm*, most heartbeats are left out: one is written when state or round change, and
    then one per heartbeat timeout, or fewer while the replica computes
    (:func:`~diloco.protocol.control_pace.calm_interval_s`). The lease shows the interval. Commands
    are read less often. A process that waits for the replica creates
    :func:`diloco.protocol.keys.awaited` of its round, which is read as often as heartbeats are due
    otherwise; then every heartbeat is written.
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
        if not 0 < interval_s < SUSPECTED_SHARE * heartbeat_timeout_s:
            raise ValueError(
                f"heartbeat interval: expected more than 0 and less than half of the group's "
                f"timeout of {heartbeat_timeout_s:g} s, found {interval_s:g} s"
            )
        self.identity = identity
        self.stop_requested = False
        self.save_after: int | None = None
        self.fenced = False
        self.committer = 0
        self.on_message: Callable[[str], None] = lambda message: None
        """Called with each new message of the progress, i.e. what the replica waits for."""
        self._store = store
        self._clock = clock
        self.interval_s = interval_s
        self._device = device
        self._role = role
        self._on_drain = on_drain
        self._started_wall_s, self._started_s = clock.wall(), clock.monotonic()
        self._progress = Progress()
        self._count = 0
        self._longest_gap_s = heartbeat_timeout_s / 2
        self._next_beat_s = clock.monotonic()
        self._contact = self._next_beat_s, Gaps()
        """When this process last wrote its lease, or had none to write, and its gaps before."""
        self._calm_ticks = 0
        self._timeout_s = heartbeat_timeout_s
        self._awaited_round = self._looked_round = 0
        self._shown = ("", 0)
        """State and round of the last heartbeat."""
        self._next_command = 1
        self._looks = self._checks = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self, *, check: Callable[[], None] = lambda: None) -> None:
        """Write the first heartbeat, read the existing commands and start the thread.

        Waits up to :data:`PATIENCE_S` for an unavailable store, calling ``check`` meanwhile. Raises
        :class:`StoreUnavailable`.
        """
        patiently(self.beat, clock=self._clock, check=check)
        patiently(lambda: self._read_commands(new=False), clock=self._clock, check=check)
        self._checks = 1  # claiming the incarnation has listed the processes
        self._thread.start()

    def update(self, **changes: object) -> None:
        """Change fields of :class:`Progress` for the next heartbeat."""
        with self._lock:
            before = self._progress.message
            self._progress = replace(self._progress, **changes)  # type: ignore[arg-type]
            now = self._progress
        if now.message and now.message != before and now.state not in ENDED_STATES:
            self.on_message(now.message)

    @property
    def progress(self) -> Progress:
        return self._progress

    def beat(self) -> None:
        """Write a heartbeat."""
        with self._lock:
            self._count += 1
            progress = self._progress
            interval_s = self._interval_s(progress)
            beat = Heartbeat(
                replica=self.identity.replica,
                incarnation=self.identity.incarnation,
                count=self._count,
                interval_s=interval_s,
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
                uptime_s=self._clock.monotonic() - self._started_s,
            )
        self._store.put(
            keys.beat(self.identity.replica, self.identity.incarnation), beat.to_bytes()
        )
        now_s = self._clock.monotonic()
        self._next_beat_s = now_s + interval_s
        self._shown = _shown(progress)
        self._note_contact(now_s)

    def _note_contact(self, now_s: float) -> None:
        with self._lock:
            self._contact = now_s, self._gaps_at(now_s)

    def _gaps_at(self, now_s: float) -> Gaps:
        contact_s, gaps = self._contact
        has_gap = now_s - contact_s > self._longest_gap_s
        return Gaps(gaps.count + 1, now_s) if has_gap else gaps

    @property
    def gaps(self) -> Gaps:
        """The times of more than half the heartbeat timeout in which this process did not run, or
        could not write a heartbeat that was due: the store was unavailable. Other leases that did
        not change in them can still be alive."""
        return self._gaps_at(self._clock.monotonic())

    def look_around(self, *, newer: bool = True, commands: bool = True) -> None:
        """With ``newer`` check for a newer incarnation of this replica, with ``commands`` read new
        commands."""
        try:
            if newer and not self.fenced and (found := self._newer_process()):
                log.error("%s is fenced out by %s", self.identity, found)
                self.fenced = True
        except ListingTooLong as error:  # commands must be read in any case
            log.error("cannot check for newer processes of this replica: %s", error)
        if commands:
            self._read_commands()

    def _newer_process(self) -> str:
        """Return the key of a newer process of this replica, or ''.

        Sequence numbers are claimed without gaps, so a newer process has claimed the next number:
        one GET. A listing also finds processes of a store without atomic create, which claim none,
        and those whose claim is lost.
        """
        replica, own = self.identity.replica, self.identity.incarnation
        if self._store.atomic_create and self._checks % CHECKS_PER_LIST:
            claim = keys.claim(replica, keys.incarnation_seq(own) + 1)
            try:
                self._store.get_range(claim, 0, 1)
            except MissingKey:
                self._checks += 1
                return ""
            return claim
        for info in self._store.list(keys.member(replica)):
            parsed = keys.parse_beat(info.key)
            if parsed and parsed[1] > own:
                return info.key
        self._checks += 1
        return ""

    def _read_commands(self, *, new: bool = True) -> None:
        """Execute the commands after the last one read. Numbers have no gaps, but an object can be
        lost. So the folder is listed at the start and every :data:`LIST_EVERY` reads, and
        missing numbers before a listed one are skipped."""
        listed = self._list_commands() if self._looks % LIST_EVERY == 0 else []
        self._looks += 1
        while True:
            number = self._next_command
            try:
                command = read_record(
                    self._store,
                    keys.control(number),
                    Command,
                    is_right=partial(_has_number, number),
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
                self._execute(command, new=new)

    def _list_commands(self) -> list[int]:
        """Return the numbers of all objects below ``control/``."""
        try:
            stored = [info.key for info in self._store.list(keys.CONTROL)]
        except ListingTooLong as error:
            log.error("cannot check for commands after a missing one: %s", error)
            return []
        return [number for key in stored if (number := keys.parse_control(key)) is not None]

    def _execute(self, command: Command, *, new: bool) -> None:
        if command.command == "stop":
            log.info("command %d: stop", command.n)
            self.stop_requested = True
        elif command.command == "resume":
            log.info("command %d: resume, earlier stops are cancelled", command.n)
            self.stop_requested = False
        elif command.command == "save" and _is_round(command.arguments.get("round")):
            log.info("command %d: save a checkpoint", command.n)
            self.save_after = command.arguments["round"]
        elif command.command == "committer" and isinstance(command.arguments.get("replica"), int):
            self.committer = command.arguments["replica"]
            log.info("command %d: replica %d is the coordinator", command.n, self.committer)
        elif command.command == "drain" and self._on_drain is not None:
            self._drain(command, new=new)
        else:
            log.error("command %d is refused: unknown command %r", command.n, command.command)

    def _drain(self, command: Command, *, new: bool) -> None:
        assert self._on_drain is not None
        within_s = command.arguments.get("within_s", DRAIN_WITHIN_S)
        reason = command.arguments.get("reason", f"drained by command {command.n}")
        target = command.arguments.get("incarnation", self.identity.incarnation if new else "")
        is_number = isinstance(within_s, int | float) and not isinstance(within_s, bool)
        if not is_number or not 0 <= within_s < float("inf"):
            log.error(
                "command %d is refused: within_s: expected seconds, found %r", command.n, within_s
            )
        elif not isinstance(target, str) or not isinstance(reason, str):
            log.error(
                "command %d is refused: expected text for incarnation and reason, found %r and %r",
                command.n,
                target,
                reason,
            )
        elif self.identity.incarnation <= target:
            log.info("command %d: drain within %g s: %s", command.n, within_s, reason)
            self._on_drain(float(within_s), reason[:LONGEST_REASON])

    def check_fence(self) -> None:
        """Raise :class:`FencedOut` if a newer process of this replica has started."""
        if self.fenced:
            raise FencedOut(f"a newer process of replica {self.identity.replica} has started")

    def end(self, state: str, message: str = "") -> None:
        """Stop the thread and write the last heartbeat."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.update(state=state, message=message)
        if not self.fenced:
            self.beat()

    def _run(self) -> None:
        looks = looks_per_beat(self.interval_s)
        calm_looks = calm_looks_per_read(self.interval_s / looks)
        look = 0
        while not self._ended.wait(self.interval_s / looks):
            look += 1
            calm = self._is_calm(self._progress)
            try:
                self.look_around(
                    newer=look % (CALM_CHECK_EVERY if calm else CHECK_EVERY) == 0,
                    commands=not calm or look % calm_looks == 0,
                )
                if self.fenced:
                    return  # the lease is the newer process's
                if look % looks == 0:
                    self.beat_if_due()
            except StoreError as error:
                log.warning("heartbeat failed, will retry: %s", error)
            except Exception:  # without this thread the group would count the replica as dead
                log.exception("heartbeat failed, will retry")

    def beat_if_due(self) -> None:
        """Write a heartbeat, unless the replica is calm and its last one is recent."""
        progress, now_s = self._progress, self._clock.monotonic()
        self._ask_if_awaited(progress)
        is_early = now_s + self.interval_s / 2 < self._next_beat_s
        if self._is_calm(progress) and is_early and self._shown == _shown(progress):
            self._note_contact(now_s)
        else:
            self.beat()

    @property
    def can_be_awaited(self) -> bool:
        """Whether a process can be waiting for this replica; False if it has looked in this round,
        and was not asked for heartbeats."""
        progress = self._progress
        return not self._is_calm(progress) or progress.round != self._looked_round

    @property
    def is_awaited(self) -> bool:
        """Whether a process waits for this replica, or the replica would not know."""
        return not self._is_calm(self._progress)

    def _interval_s(self, progress: Progress) -> float:
        """Return the seconds until the next heartbeat if state and round stay the same."""
        if not self._is_calm(progress):
            return self.interval_s
        return calm_interval_s(self._timeout_s, left_s=self._left_s(progress))

    def _left_s(self, progress: Progress) -> float:
        """Return the seconds for which the replica will probably compute."""
        if progress.state != AWAITED_STATE:
            return 0.0
        return progress.ends_s - self._clock.monotonic()

    def _is_calm(self, progress: Progress) -> bool:
        is_awaited = progress.state == AWAITED_STATE and progress.round == self._awaited_round
        is_needed = progress.state not in CALM_STATES or progress.blocked is not None
        is_needed = is_needed or progress.is_short_round
        return progress.calm and not is_awaited and not is_needed

    def _ask_if_awaited(self, progress: Progress) -> None:
        """Note whether a process waits for this replica. If the store does not answer, assume
        so."""
        if progress.state != AWAITED_STATE or not self._is_calm(progress):
            return
        self._calm_ticks += 1
        if self._calm_ticks % awaited_looks(self._left_s(progress), self._timeout_s):
            return
        try:
            self._store.get_range(keys.awaited(progress.round), 0, 1)
        except MissingKey:
            self._looked_round = progress.round
            return
        except StoreError as error:
            log.warning("cannot read whether this replica is awaited: %s", error)
        self._awaited_round = progress.round


def _shown(progress: Progress) -> tuple[str, int]:
    return progress.state, progress.round


def _is_round(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
