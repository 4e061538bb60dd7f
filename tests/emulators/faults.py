"""Faults of single requests, shared by the emulators of AWS, the Hub and Modal.

:class:`RequestFaults` decides the fault of each request: by a test's ``rule`` for the operation's
name, or by an interruption (:mod:`tests.emulators.interruptions`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from tests.emulators.interruptions import Interruptions, Outcome

Fault = Literal["", "drop_before", "drop_after", "unavailable"]
"""None; the connection is closed before or after the request is applied; 503 or an equivalent."""


class HangUp(Exception):
    """Close the connection without a response."""


class RequestFaults:
    """The faults of one server. Thread-safe."""

    def __init__(self) -> None:
        self.interruptions = Interruptions()
        self.rule: Callable[[str], Fault] = lambda operation: ""

    def of(self, operation: str) -> Fault:
        """The fault of the request that has just arrived."""
        outcome = self.interruptions.before()
        if outcome is Outcome.REFUSE:
            return "unavailable"
        if outcome is Outcome.DROP:
            return "drop_before"
        # Read now: later this thread can serve another request.
        if self.interruptions.after() is Outcome.DROP:
            return "drop_after"
        return self.rule(operation)
