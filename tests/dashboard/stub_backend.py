"""A stub backend that replaces Modal.

It implements the protocol of :mod:`executors.base` for tests of pages and preflight;
``tests/contracts`` tests the executors themselves.
"""

from __future__ import annotations

import dataclasses
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
    """Behaviour of all executors of :func:`stubbed`."""

    def __init__(self) -> None:
        self.capabilities = Capabilities(
            max_lifetime_s=86_400.0, spot=True, regions=("us-east", "eu-west")
        )
        self.who = "workspace acme"
        self.error: Exception | None = None
        self.problems: list[Problem] = []
        self.lines: list[str] = []
        self.hang: threading.Event | None = None
        self.preflights: list[tuple[ReplicaSpec, int]] = []

    def can(self, **changes: Any) -> None:
        self.capabilities = replace(self.capabilities, **changes)

    def respond(self) -> None:
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
        STUB.respond()
        return STUB.who

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        STUB.preflights.append((spec, count))
        return STUB.problems

    def logs(
        self, handle: ReplicaHandle, *, after: str = "", follow: bool = False
    ) -> Iterator[LogLine]:
        STUB.respond()
        begin = int(after or 0)
        for n, text in enumerate(STUB.lines[begin:], begin + 1):
            yield LogLine(text=text, position=str(n))

    def ensure(self, *args: Any, **options: Any) -> Sequence[ReplicaHandle]:
        raise AssertionError("no job can be started in this test")


def stubbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """For a fixture: a new stub in place of Modal."""
    STUB.__init__()  # type: ignore[misc]
    stub = dataclasses.replace(registry.DESCRIPTIONS["modal"], executor=f"{__name__}:StubExecutor")
    monkeypatch.setitem(registry.DESCRIPTIONS, "modal", stub)
    executors._executor.cache_clear()
    yield STUB
    if STUB.hang is not None:
        STUB.hang.set()
    executors._executor.cache_clear()
