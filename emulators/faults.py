"""Faults of single requests, which every emulated backend injects alike.

A server calls its ``fault`` with the name of each operation before it answers: that a request is
lost, or carried out and its answer lost, can happen to any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Fault = Literal["", "drop_before", "drop_after", "unavailable"]
"""Nothing; the connection ends before the request is carried out, or after; 503 or its like."""

FAULTS: tuple[Fault, ...] = ("drop_before", "drop_after", "unavailable")

RequestFault = Callable[[str], Fault]


class HangUp(Exception):
    """The connection is to end without an answer."""


def no_fault(operation: str) -> Fault:
    return ""
