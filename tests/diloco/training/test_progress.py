"""The ``progress`` argument of ``join``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import diloco
from diloco.training.progress import RoundProgress


def train(folder: Path, progress: object) -> None:
    settings = diloco.GroupSettings(
        num_replicas=1, sync_every=2, total_rounds=3, warmup_steps=0, eval_every=0
    )
    diloco.create_group(str(folder), settings)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diloco.join(
        str(folder),
        model=model,
        inner_optimizer=optimizer,
        replica=0,
        progress=progress,  # type: ignore[arg-type]
    ) as group:
        while not group.done:
            group.step(tokens=5, loss=2.0)


def test_a_function_receives_every_round(tmp_path: Path) -> None:
    rounds: list[RoundProgress] = []
    train(tmp_path, rounds.append)
    assert [(p.round, p.committed, p.total_rounds, p.outcome) for p in rounds] == [
        (1, 1, 3, "included"),
        (2, 2, 3, "included"),
        (3, 3, 3, "included"),
    ]
    assert [(p.tokens, p.loss, p.contributors) for p in rounds] == [
        (10, 2.0, 1),
        (20, 2.0, 1),
        (30, 2.0, 1),
    ]


def test_true_prints_a_line_per_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, True)
    lines = [line for line in capsys.readouterr().err.splitlines() if "committed" in line]
    assert len(lines) == 3
    assert lines[2].startswith("round 3  3/3 committed  included  1 contributors  loss 2.0000")


def test_by_default_nothing_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, False)
    assert "committed  included" not in capsys.readouterr().err
