"""Post-round tasks and the durations that they report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.group import join
from diloco.init import create_group
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import RoundReport, Segment
from diloco.store.base import LocalStore, Store
from diloco.training.final_result import read_final
from tests.diloco.clocks import FastClock
from tests.diloco.conftest import Killed, MortalStore, Trap

EVALUATION_S = 500.0

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # the lease of a killed member
)


class EvaluatingClock(FastClock):
    """An evaluation that takes some time."""

    passed_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.passed_s

    def evaluate(self) -> tuple[float, int]:
        self.passed_s += EVALUATION_S
        return 1.0, 10


def segments(root: Path) -> list[Segment]:
    store = LocalStore(root)
    listed = sorted(info.key for info in store.list("telemetry/"))
    return [Segment.from_bytes(store.get(key)) for key in listed]


def train(root: Path, clock: EvaluatingClock, *, store: Store | None = None, **chosen: Any) -> None:
    """Run one replica to the end, without telemetry in between."""
    settings = GroupSettings(
        num_replicas=1,
        sync_every=4,
        state_every=0,
        checkpoint_every=100,
        start_wait_s=0.0,
        warmup_steps=0,
        **chosen,
    )
    create_group(str(root), settings=settings)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with join(
        str(root),
        model=model,
        inner_optimizer=optimizer,
        replica=0,
        clock=clock,
        store=store,
        evaluate=clock.evaluate,
        telemetry_interval_s=1e9,
    ) as group:
        going = True
        while going:
            loss = model(torch.ones(1, 4)).sum() ** 2
            loss.backward()
            optimizer.step()
            going = group.step(tokens=1, loss=loss.detach())


def test_telemetry_is_written_before_the_final_manifest(tmp_path: Path) -> None:
    """A reader of the manifest also finds the last step, before the sample is drawn."""
    killer = MortalStore(LocalStore(tmp_path), Trap("create", "final/manifest.json", "after"))
    with pytest.raises(Killed):
        train(tmp_path, EvaluatingClock(), store=killer, total_rounds=2)
    assert read_final(LocalStore(tmp_path)) is not None
    steps = [step for segment in segments(tmp_path) for step in segment.steps.step]
    assert steps == list(range(8))


@pytest.mark.parametrize("overlap", [0, 2])
def test_evaluation_time_is_reported_separately(tmp_path: Path, overlap: int) -> None:
    train(tmp_path, EvaluatingClock(), total_rounds=4, eval_every=2, overlap_steps=overlap)
    result: list[RoundReport] = [r for segment in segments(tmp_path) for r in segment.rounds]
    assert [report.round for report in result] == [1, 2, 3, 4]
    other_s = [report.phases.get("other", 0.0) for report in result]
    assert [seconds >= EVALUATION_S for seconds in other_s] == [False, True, False, True]
    # With overlap an exchange runs beside the evaluation, and its phases contain that time, too.
    rest = {"compute"} if overlap else {phase for r in result for phase in r.phases}
    rest -= {"other", "start"}
    rest_s = [s for r in result for phase, s in r.phases.items() if phase in rest]
    assert max(rest_s) < EVALUATION_S
