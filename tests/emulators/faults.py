"""Faults of single requests, which the emulators of AWS, the Hub and Modal inject alike.

A server asks :class:`RequestFaults` what happens to each request: a test's own ``rule``, by the
operation's name, or an interruption (:mod:`tests.emulators.interruptions`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from tests.emulators.interruptions import Interruptions, Outcome

Fault = Literal["", "drop_before", "drop_after", "unavailable"]
"""Nothing; the connection ends before the request is carried out, or after; 503 or its like."""


class HangUp(Exception):
    """The connection is to end without an answer."""


class RequestFaults:
    """Of one server. Thread-safe."""

    def __init__(self) -> None:
        self.interruptions = Interruptions()
        self.rule: Callable[[str], Fault] = lambda operation: ""

    def of(self, operation: str) -> Fault:
        """What happens to the request that has just arrived."""
        outcome = self.interruptions.before()
        if outcome is Outcome.REFUSE:
            return "unavailable"
        if outcome is Outcome.DROP:
            return "drop_before"
        # Asked at once: later another request can be this thread's.
        if self.interruptions.after() is Outcome.DROP:
            return "drop_after"
        return self.rule(operation)
