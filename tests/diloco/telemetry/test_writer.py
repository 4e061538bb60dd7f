"""Rows buffered during an outage are written in segments within the readers' limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.clock import SystemClock
from diloco.protocol.records import Identity
from diloco.protocol.telemetry import MAX_LOGS, MAX_STEPS, Segment
from diloco.store.base import LocalStore
from diloco.telemetry.writer import TelemetryWriter


def test_large_buffers_are_split_into_segments(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    identity = Identity(replica=0, incarnation="00001-00000000")
    telemetry = TelemetryWriter(store, identity, clock=SystemClock(), interval_s=60.0)
    for step in range(1, MAX_STEPS + 2):
        telemetry.step(
            step=step, round=1, tokens=step, loss=1.0, lr=1e-3, grad_norm=1.0, step_s=0.1
        )
    for _ in range(900):
        telemetry.log("info", "{🏝" * 2000)
    telemetry.flush(last=True)
    listed = [info.key for info in store.list("telemetry/")]
    result = [Segment.read(store, key) for key in listed]
    assert [s for segment in result for s in segment.steps.step] == [*range(1, MAX_STEPS + 2)]
    assert sum(len(segment.logs) for segment in result) == 900
    assert max(len(segment.logs) for segment in result) <= MAX_LOGS // 2
    assert [segment.n for segment in result] == [*range(1, len(result) + 1)]
    assert [segment.last for segment in result] == [False] * (len(result) - 1) + [True]


class Pauses:
    """Replaces the event that ends the writer's thread: records the waits, and ends after some."""

    def __init__(self, last: int) -> None:
        self.seconds: list[float] = []
        self._last = last

    def wait(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        return len(self.seconds) > self._last


def test_the_first_segments_are_close_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = Identity(replica=0, incarnation="00001-00000000")
    telemetry = TelemetryWriter(
        LocalStore(tmp_path), identity, clock=SystemClock(), interval_s=30.0
    )
    pauses = Pauses(6)
    monkeypatch.setattr(telemetry, "_ended", pauses)
    telemetry._run()
    assert pauses.seconds == [2, 4, 8, 16, 30, 30, 30]
