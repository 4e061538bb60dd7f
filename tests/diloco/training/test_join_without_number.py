"""``join`` without a replica number: it comes from the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diloco
from diloco.errors import ReplicaError
from tests.diloco.clocks import FastClock

SETTINGS = diloco.GroupSettings(
    num_replicas=1, sync_every=2, total_rounds=6, warmup_steps=0, eval_every=0
)


def join(folder: Path, **options: Any) -> diloco.Group:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return diloco.join(
        str(folder), model, optimizer, settings=SETTINGS, clock=FastClock(), **options
    )


def train(group: diloco.Group, rounds: int = SETTINGS.total_rounds) -> None:
    while not group.done and group.round <= rounds:
        group.step(tokens=5, loss=2.0)


def test_two_processes_in_turn_are_one_replica(tmp_path: Path) -> None:
    with join(tmp_path) as first:
        assert first.replica == 0
        train(first, 3)
    assert first.reason == "left"
    with join(tmp_path) as second:
        assert second.replica == 0 and second.identity.incarnation > first.identity.incarnation
        assert second.round == 4 and second.data_step == first.data_step == 6
        train(second)
    assert second.reason == "completed"


def test_after_kill_9_the_number_and_its_state_are_taken_over(tmp_path: Path) -> None:
    killed = join(tmp_path)
    train(killed, 3)
    killed._loop.save(lambda: False)
    killed._lease._ended.set()  # no further heartbeat, and no last one
    with join(tmp_path) as group:
        assert group.replica == 0 and group.data_step == killed.data_step == 6
        train(group)
    assert group.reason == "completed"
    assert not killed.done


def test_the_variable_and_the_argument_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICA_RANK", "2")
    with join(tmp_path) as group:
        assert group.replica == 2
    with join(tmp_path, replica=5) as group:
        assert group.replica == 5
    monkeypatch.setenv("REPLICA_RANK", "")
    with join(tmp_path) as group:
        assert group.replica == 2


def test_a_wrong_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReplicaError, match="replica number from 0 to 15, found 16"):
        join(tmp_path, replica=16)
    monkeypatch.setenv("REPLICA_RANK", "one")
    with pytest.raises(ValueError, match="REPLICA_RANK: expected a replica number, found 'one'"):
        join(tmp_path)
