"""Interrupt requests in emulators: a crash of the client, its network or the service.

A server calls :meth:`Interruptions.before` when a request has arrived, and
:meth:`Interruptions.after` when it has been applied. Both return the outcome for the connection. A
killed client sends nothing more. The server emulates that: it drops all later requests until
:meth:`Interruptions.restore`.
"""

from __future__ import annotations

import enum
import threading


class Interruption(enum.StrEnum):
    """The kind of interruption of one request."""

    REFUSED = "refused"
    """Answered with 503, and not applied. The client continues."""
    LOST = "lost"
    """Applied, but the connection breaks before the answer. The client continues."""
    KILLED_BEFORE = "killed-before"
    """The client dies before the request arrives."""
    KILLED_AFTER = "killed-after"
    """The client dies after the request was applied, before it reads the answer."""


class Outcome(enum.Enum):
    """The server's reaction to a request."""

    PROCEED = enum.auto()
    REFUSE = enum.auto()
    DROP = enum.auto()


class Interruptions:
    """Counts requests from :meth:`interrupt` on, and interrupts one of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = 0
        self._at: int | None = None
        self._how = Interruption.REFUSED
        self._client_is_dead = False
        self._drop_answer = threading.local()

    def interrupt(self, at: int, how: Interruption) -> None:
        """Interrupt request number ``at``, counted from 0 from now on."""
        with self._lock:
            self._seen, self._at, self._how, self._client_is_dead = 0, at, how, False

    def restore(self) -> int:
        """Stop interrupting. Returns the number of requests since :meth:`interrupt`."""
        with self._lock:
            self._at, self._client_is_dead = None, False
            return self._seen

    def before(self) -> Outcome:
        """A request has arrived."""
        self._drop_answer.value = False
        with self._lock:
            number, self._seen = self._seen, self._seen + 1
            if self._client_is_dead:
                return Outcome.DROP
            if self._at != number:
                return Outcome.PROCEED
            if self._how is Interruption.REFUSED:
                return Outcome.REFUSE
            self._client_is_dead = self._how is not Interruption.LOST
            if self._how is Interruption.KILLED_BEFORE:
                return Outcome.DROP
        self._drop_answer.value = True
        return Outcome.PROCEED

    def after(self) -> Outcome:
        """The request of this thread has been applied."""
        return Outcome.DROP if getattr(self._drop_answer, "value", False) else Outcome.PROCEED
