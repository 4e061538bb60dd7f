"""What waits after an outage is written in segments that readers take."""

from __future__ import annotations

from pathlib import Path

from diloco.clock import SystemClock
from diloco.protocol.records import Identity
from diloco.protocol.telemetry import MAX_LOGS, MAX_STEPS, Segment
from diloco.store.base import LocalStore
from diloco.telemetry.writer import Reporter


def test_many_steps_and_long_lines_are_split(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    identity = Identity(replica=0, incarnation="00001-00000000")
    reporter = Reporter(store, identity, clock=SystemClock(), interval_s=60.0)
    for step in range(1, MAX_STEPS + 2):
        reporter.step(
            step=step, round=1, tokens=step, loss=1.0, lr=1e-3, grad_norm=1.0, step_s=0.1
        )  # fmt: skip
    for _ in range(900):
        reporter.log("info", "{🏝" * 2000)
    reporter.flush(last=True)
    listed = [info.key for info in store.list("telemetry/")]
    found = [Segment.read(store, key) for key in listed]
    assert [s for segment in found for s in segment.steps.step] == [*range(1, MAX_STEPS + 2)]
    assert sum(len(segment.logs) for segment in found) == 900
    assert max(len(segment.logs) for segment in found) <= MAX_LOGS // 2
    assert [segment.n for segment in found] == [*range(1, len(found) + 1)]
    assert [segment.last for segment in found] == [False] * (len(found) - 1) + [True]
