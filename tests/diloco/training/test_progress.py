"""The ``progress`` argument of ``join``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

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


def test_true_prints_what_the_replica_does_before_the_first_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, True)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if re.match(r"replica 0 joins run [0-9a-f]+$", line)]


def test_true_prints_that_the_run_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, True)
    assert "has ended" not in capsys.readouterr().err
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diloco.join(str(tmp_path), model, optimizer, replica=0, progress=True) as group:
        assert group.done
    lines = capsys.readouterr().err.splitlines()
    ended = "the run has ended (completed, 3 rounds committed): enter another URI for a new run"
    assert ended in lines


def test_an_error_of_the_join_is_no_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, False)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(diloco.ModelMismatch, match="Build the group's model"):
        diloco.join(str(tmp_path), model, optimizer, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert not [line for line in lines if line.startswith("expected the group's model")]


class Bar:
    """Records what a bar of tqdm shows."""

    shown: ClassVar[list[str]] = []

    def __init__(self, *, total: int, initial: int, unit: str) -> None:
        self.n, self.total = initial, total

    def set_postfix_str(self, text: str) -> None:
        self.shown.append(f"{self.n}/{self.total} {text}")

    def close(self) -> None:
        self.shown.append("closed")

    @classmethod
    def write(cls, line: str, file: object) -> None:
        cls.shown.append(line)


def test_a_bar_shows_the_rounds_where_tqdm_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=Bar))  # type: ignore[arg-type]
    Bar.shown.clear()
    train(tmp_path, True)
    assert Bar.shown[0].startswith("replica 0 joins run")
    assert Bar.shown[-4:] == [
        "1/3 loss 2.0000, 1 contributors",
        "2/3 loss 2.0000, 1 contributors",
        "3/3 loss 2.0000, 1 contributors",
        "closed",
    ]


def test_without_tqdm_a_terminal_has_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm", None)  # type: ignore[arg-type]
    train(tmp_path, True)
    assert "3/3 committed" in capsys.readouterr().err


def test_by_default_nothing_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, False)
    assert "committed  included" not in capsys.readouterr().err
