"""The lines to the stores of processes on virtual threads."""

from __future__ import annotations

from typing import Any

from diloco.store.transfers import BYTES_IN_FLIGHT, Line
from tests.diloco.model.virtual_time import Process, Scheduler


class LineOfEach:
    """The line of the process that runs: each one has its own, in virtual time, with
    ``budget_bytes`` for parts in flight."""

    def __init__(self, scheduler: Scheduler, budget_bytes: int = BYTES_IN_FLIGHT) -> None:
        self._scheduler = scheduler
        self._budget_bytes = budget_bytes
        self._lines: dict[Process | None, Line] = {}

    def __getattr__(self, name: str) -> Any:
        process = self._scheduler.process
        if process not in self._lines:
            self._lines[process] = Line(clock=self._scheduler, budget_bytes=self._budget_bytes)
        return getattr(self._lines[process], name)
