"""A backend that says what a test wants it to, in the place of Modal's.

Pages and preflight speak the protocol of :mod:`executors.base`; that the executors themselves do is
``tests/contracts``' matter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from executors import registry
from executors.base import (
    Capabilities,
    ExecutorConfig,
    LogLine,
    Problem,
    ReplicaHandle,
    ReplicaSpec,
)
from runs.backends import executors


class Stub:
    """Read by every executor of :func:`stubbed`."""

    def __init__(self) -> None:
        self.capabilities = Capabilities(
            max_lifetime_s=86_400.0, spot=True, regions=("us-east", "eu-west")
        )
        self.who = "workspace acme"
        self.error: Exception | None = None
        self.problems: list[Problem] = []
        self.lines: list[str] = []
        self.hang: threading.Event | None = None
        self.asked: list[tuple[ReplicaSpec, int]] = []

    def can(self, **changes: Any) -> None:
        self.capabilities = replace(self.capabilities, **changes)

    def answer(self) -> None:
        if self.hang is not None:
            self.hang.wait(60)
        if self.error is not None:
            raise self.error


STUB = Stub()


class StubExecutor:
    backend = "modal"

    def __init__(self, config: ExecutorConfig) -> None:
        self.config = config

    @property
    def capabilities(self) -> Capabilities:
        return STUB.capabilities

    def check(self) -> str:
        STUB.answer()
        return STUB.who

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        STUB.asked.append((spec, count))
        return STUB.problems

    def logs(
        self, handle: ReplicaHandle, *, after: str = "", follow: bool = False
    ) -> Iterator[LogLine]:
        STUB.answer()
        begin = int(after or 0)
        for n, text in enumerate(STUB.lines[begin:], begin + 1):
            yield LogLine(text=text, position=str(n))

    def ensure(self, *args: Any, **options: Any) -> Sequence[ReplicaHandle]:
        raise AssertionError("nothing may be started here")


def stubbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """For a fixture: a fresh stub in Modal's place."""
    STUB.__init__()  # type: ignore[misc]
    monkeypatch.setitem(registry.CLASSES, "modal", f"{__name__}:StubExecutor")
    executors._executor.cache_clear()
    yield STUB
    if STUB.hang is not None:
        STUB.hang.set()
    executors._executor.cache_clear()
