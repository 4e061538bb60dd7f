"""A member's state: what others heal from, what it heals from, and what is saved.

The state is what the registered functions give, beside the Manager's own step counts:
``{"user": {key: ...}, "torchft": {"step": ..., "batches_committed": ...}}``, torchft's shape.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from diloco.errors import ReplicaError
from diloco.managed import states
from diloco.managed.session import Session
from diloco.rendezvous.manager_records import Quorum
from diloco.rendezvous.manager_rounds import Standing
from diloco.rendezvous.records import Identity
from diloco.rendezvous.store import MissingKey

if TYPE_CHECKING:
    from collections.abc import Iterator


class Recovery:
    """``own_state`` gives the Manager's step counts; ``ranks`` of a replica save together."""

    def __init__(
        self,
        session: Session,
        *,
        ranks: int,
        timeout_s: float,
        save_every: int,
        own_state: Callable[[], dict[str, int]],
    ) -> None:
        self._session = session
        self._store = session.store
        self._ranks = list(range(ranks))
        self._timeout_s = timeout_s
        self._save_every = save_every
        self._own_state = own_state
        self._load: dict[str, Callable[[Any], None]] = {}
        self._save: dict[str, Callable[[], Any]] = {}
        self._pending: dict[str, Any] | None = None
        self._saved_step = 0
        self._reading = threading.Lock()
        self._readable = True

    def register(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        if key in self._load:
            raise ValueError(f"state_dict key: expected a new one, found {key!r} again")
        self._load[key] = load
        self._save[key] = save

    # -- reading ---------------------------------------------------------------------------------

    def disallow_read(self) -> None:
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
        """Of this member, now; not while reading is disallowed."""
        with self._read_lock():
            if not self._save:
                raise RuntimeError("expected register_state_dict_fn, found no state to give")
            return {
                "user": {key: save() for key, save in self._save.items()},
                "torchft": self._own_state(),
            }

    # -- healing ---------------------------------------------------------------------------------

    def recover(self, quorum: Quorum, place: Standing) -> dict[str, int] | None:
        """Send or fetch what this round needs; when fetched, the source's step counts.

        What was fetched waits for :meth:`apply`, which loads it in the caller's thread.
        """
        self._pending = None
        rank, me = place.seat.rank, self._session.me
        if place.source == place.seat:
            needed = any(seat.heals and seat.rank == rank for seat in quorum.seats)
            due = self._save_every > 0 and quorum.step > self._saved_step
            due = due and quorum.step % self._save_every == 0
            if needed or due:
                state = self.state()
                if needed:
                    states.send(
                        self._store, quorum.n, rank, state, step=quorum.step, writer=me
                    )  # fmt: skip
                if due and self._load:
                    states.save(self._store, rank, state, step=quorum.step, writer=me)
                    self._saved_step = quorum.step
        if not place.heals:
            return None
        wait = self._session.wait(self._timeout_s)
        source = Identity(replica=place.source.member, incarnation=place.source.incarnation)
        state = states.receive(
            self._store,
            quorum.n,
            rank,
            wait,
            why_lost=lambda: self._session.why_lost(quorum.n, source),
        )
        self._pending = self._checked(state)
        own: dict[str, int] = self._pending["torchft"]
        return own

    def apply(self) -> bool:
        """Load what was fetched; False where nothing was."""
        if self._pending is None:
            return False
        user, self._pending = self._pending["user"], None
        for key, load in self._load.items():
            load(user[key])
        return True

    def resume(self) -> dict[str, int] | None:
        """Load the newest state that all ranks have saved; its step counts, None without one."""
        for step in reversed(states.saved_steps(self._store, ranks=self._ranks)):
            try:
                state = states.load(self._store, self._session.rank, step)
            except MissingKey:
                continue  # superseded since it was listed
            self._pending = self._checked(state)
            self._saved_step = step
            own: dict[str, int] = self._pending["torchft"]
            self.apply()
            return own
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
