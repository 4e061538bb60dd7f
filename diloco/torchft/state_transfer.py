"""The state of a member: sent to members that heal, received to heal, and saved to resume.

The state has torchft's shape, ``{"user": {key: ...}, "torchft": {"step": ...,
"batches_committed": ...}}``: the results of the registered functions and the Manager's counts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from diloco.clock import Clock
from diloco.errors import ReplicaError
from diloco.protocol.manager_branches import UNKNOWN, Line, line_before
from diloco.protocol.manager_keys import Saved
from diloco.protocol.manager_records import Quorum
from diloco.protocol.manager_rounds import MemberView
from diloco.protocol.records import Identity
from diloco.store.base import MissingKey
from diloco.torchft import state_store
from diloco.torchft.quorum_client import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)


class Recovery:
    """Healing and saved states of one member.

    ``own_state`` returns the Manager's counts. A saved state is complete with all ranks of the
    replica. ``branch`` and ``head`` are the origin of this member's current state
    (:mod:`diloco.protocol.manager_branches`).
    """

    def __init__(
        self,
        session: Session,
        *,
        timeout_s: float,
        save_every: int,
        own_state: Callable[[], dict[str, int]],
        clock: Clock,
    ) -> None:
        self._clock = clock
        self.branch, self.head = UNKNOWN, 0
        self._taken = (UNKNOWN, 0)
        self._session = session
        self._store = session.store
        self._ranks = list(range(session.world_size))
        self._timeout_s = timeout_s
        self._save_every = save_every
        self._own_state = own_state
        self._load: dict[str, Callable[[Any], None]] = {}
        self._save: dict[str, Callable[[], Any]] = {}
        self._pending: dict[str, Any] | None = None
        self._saved: Saved | None = None
        self._reading = threading.Lock()
        self._readable = True

    def register(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Add a part of the state. Raises :class:`ValueError` for a key that is in use."""
        if key in self._load:
            raise ValueError(f"state_dict key: expected a new one, found {key!r} twice")
        self._load[key] = load
        self._save[key] = save

    # -- reading ---------------------------------------------------------------------------------

    def disallow_read(self) -> None:
        """Block reads of the state until :meth:`allow_read`."""
        if self._readable:
            self._reading.acquire()
            self._readable = False

    def allow_read(self) -> None:
        if not self._readable:
            self._readable = True
            self._reading.release()

    @contextmanager
    def _read_lock(self) -> Iterator[None]:
        if not self._reading.acquire(timeout=self._timeout_s):
            raise TimeoutError(
                f"expected the state to be readable within {self._timeout_s:g} s, found "
                "disallow_state_dict_read without allow_state_dict_read"
            )
        try:
            yield
        finally:
            self._reading.release()

    def state(self) -> dict[str, Any]:
        """Return the current state of this member; waits while reading is disallowed."""
        with self._read_lock():
            if not self._save:
                raise RuntimeError("expected register_state_dict_fn, found no state function")
            return {
                "user": {key: save() for key, save in self._save.items()},
                "torchft": self._own_state(),
            }

    # -- healing ---------------------------------------------------------------------------------

    def recover(self, quorum: Quorum, place: MemberView) -> dict[str, int] | None:
        """Send, save or receive the state as this round requires. Returns the source's counts if a
        state was received; :meth:`apply` then loads it in the caller's thread.
        """
        self._pending = None
        if place.seat.newest and not place.heals:
            self.branch, self.head = quorum.branch, quorum.head
        rank, me = place.seat.rank, self._session.me
        if place.source == place.seat:
            needed = any(seat.heals and seat.rank == rank for seat in quorum.seats)
            due = bool(self._load) and self._is_due(quorum)
            if needed or due:
                state = self.state()
                if needed:
                    step = quorum.step
                    state_store.send(self._store, quorum.n, rank, state, step=step, writer=me)
                if due:
                    self._save_state(quorum, rank, state)
        if not place.heals:
            return None
        wait = self._session.wait(self._timeout_s)
        source = Identity(replica=place.source.member, incarnation=place.source.incarnation)
        state = state_store.receive(
            self._store,
            quorum.n,
            rank,
            wait,
            why_lost=lambda: self._session.why_lost(quorum.n, source),
        )
        self._pending = self._checked(state)
        self._taken = (quorum.branch, quorum.head)
        own: dict[str, int] = self._pending["torchft"]
        return own

    def apply(self) -> bool:
        """Load the state that was received; return False if there is none."""
        if self._pending is None:
            return False
        user, self._pending = self._pending["user"], None
        for key, load in self._load.items():
            load(user[key])
        self.branch, self.head = self._taken
        return True

    def forget(self) -> None:
        """Mark the state as unknown to the group, because the caller has loaded another one."""
        self.branch, self.head = UNKNOWN, 0

    def committed(self, quorum: Quorum) -> None:
        """Set the origin of the state to round ``quorum.n``, if the state is the one from which
        the round started."""
        if (self.branch, self.head) in ((quorum.branch, quorum.head), (quorum.branch, quorum.n)):
            self.branch, self.head = quorum.branch, quorum.n

    # -- saved states ----------------------------------------------------------------------------

    def _is_due(self, quorum: Quorum) -> bool:
        """Return whether to save: every ``save_every`` steps, and at once at the start of a branch
        whose line has no saved state."""
        if not self._save_every or not quorum.step:
            return False
        if self._saved == Saved(quorum.branch, quorum.head, quorum.step):
            return False
        begins = quorum.head == 0 and not quorum.line
        return begins or quorum.step % self._save_every == 0

    def _save_state(self, quorum: Quorum, rank: int, state: Any) -> None:
        saved = Saved(quorum.branch, quorum.head, quorum.step)
        state_store.save(
            self._store,
            rank,
            state,
            saved=saved,
            writer=self._session.me,
            wall_s=self._clock.wall(),
        )
        self._saved = saved
        if self._session.is_newest(quorum.n):
            state_store.sweep(self._store, line_before(quorum, committed=False), ranks=self._ranks)

    def resume(self) -> dict[str, int] | None:
        """Load the newest complete state of the group's line. Returns its counts, or None if there
        is no such state."""
        newest = self._session.quorum
        line = line_before(newest, committed=False) if newest else Line()
        for saved in reversed(state_store.complete_states(self._store, line, ranks=self._ranks)):
            try:
                state, wall_s = state_store.load(self._store, self._session.rank, saved)
            except MissingKey:
                continue  # deleted since it was listed
            self._pending = self._checked(state)
            self._taken = (saved.branch, saved.head)
            self._saved = saved
            own: dict[str, int] = self._pending["torchft"]
            self.apply()
            log.warning(
                "resumed at step %d from the state saved %s in %s; resume=False starts a new "
                "branch instead",
                own["step"],
                _age(self._clock.wall(), wall_s),
                self._store.uri,
            )
            return own
        return None

    def resume_before_first_quorum(self, resume: bool | Literal["auto"]) -> dict[str, int] | None:
        """Load the newest saved state, as the Manager's ``resume`` requires. Returns its counts.

        Raises :class:`~diloco.errors.ReplicaError` if ``resume`` is True and there is neither a
        saved state nor a live replica to heal from.
        """
        session = self._session
        if resume is not False and (own := self.resume()) is not None:
            return own
        if resume is True and (session.n == 0 or session.others_gone()):
            raise ReplicaError(
                f"resume=True: expected a saved state of {session.world_size} ranks in "
                f"{self._store.uri}, found none. Pass resume='auto' to start without one"
            )
        if session.n > 0:
            log.warning(
                "%s has been used before: its last round was %d, at step %d. No saved state is "
                "loaded (resume=%r): this process heals from a live replica, or starts a new "
                "branch from its own state",
                self._store.uri,
                session.n,
                session.quorum.step if session.quorum else 0,
                resume,
            )
        return None

    def _checked(self, state: Any) -> dict[str, Any]:
        match state:
            case {"user": dict(user), "torchft": {"step": int(), "batches_committed": int()}}:
                if missing := set(self._load) - set(user):
                    raise ReplicaError(
                        f"expected a state with {sorted(self._load)}, found none of "
                        f"{sorted(missing)}"
                    )
                return {"user": user, "torchft": state["torchft"]}
        raise ReplicaError(f"expected a Manager's state, found {type(state).__name__}")


def _age(now_s: float, then_s: float) -> str:
    if not then_s:
        return "by an earlier release"
    return f"{timedelta(seconds=max(0, round(now_s - then_s)))} ago (h:mm:ss)"
