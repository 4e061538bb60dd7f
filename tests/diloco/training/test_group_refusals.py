"""Joins that are refused, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.errors import ReplicaError
from diloco.group import join
from diloco.init import create_group
from diloco.protocol.settings import GroupSettings

MakeGroup = Callable[..., Any]


pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # the lease of a killed member
)


def test_a_rendezvous_without_a_group_is_an_error(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ReplicaError, match=r"expected group\.json under .*found none"):
        join(str(tmp_path), model=model, inner_optimizer=optimizer, replica=0)


def test_a_replica_number_outside_the_data_shards_is_refused(tiny_group: MakeGroup) -> None:
    group = tiny_group()
    stray = group.start(16)
    group.wait(stray)
    assert "expected a replica number from 0 to 15, found 16" in str(stray.error)


@pytest.mark.parametrize("interval_s", [2.5, 5.0])
def test_a_heartbeat_interval_of_half_the_timeout_is_refused(
    tiny_group: MakeGroup, interval_s: float
) -> None:
    """Other replicas would suspect this one between two heartbeats and close rounds without it."""
    group = tiny_group(heartbeat_timeout_s=5.0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=f"half of the group's timeout of 5 s, found {interval_s:g} s"
    ):
        join(
            str(group.root),
            model=model,
            inner_optimizer=optimizer,
            replica=0,
            heartbeat_interval_s=interval_s,
        )


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_loss_or_norm_of_several_elements_is_refused(tmp_path: Path, name: str) -> None:
    create_group(
        str(tmp_path), GroupSettings(num_replicas=1, sync_every=1, total_rounds=1, warmup_steps=0)
    )
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with join(str(tmp_path), model=model, inner_optimizer=optimizer, replica=0) as member:
        numbers = {"loss": torch.tensor(1.0), "grad_norm": torch.tensor([1.0])}
        with pytest.raises(ValueError, match=rf"{name}: expected .* of the shape \(2,\)"):
            member.step(tokens=1, **{**numbers, name: torch.ones(2)})
        assert not member.step(tokens=1, **numbers)
