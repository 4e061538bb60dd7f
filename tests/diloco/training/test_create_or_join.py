"""``join(settings=..., fresh=...)``: one of several replicas creates the group."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diloco
from diloco.errors import GroupExists, ReplicaError, SettingsMismatch
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore
from diloco.training.create_or_join import create_or_check
from tests.diloco.clocks import FastClock

SETTINGS = GroupSettings(num_replicas=1, sync_every=2, total_rounds=2, warmup_steps=0, eval_every=0)


def check(folder: Path, settings: GroupSettings = SETTINGS, **options: Any) -> GroupDocument:
    return create_or_check(LocalStore(folder), settings, clock=FastClock(), **options)


def train(folder: Path, **options: Any) -> diloco.Group:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diloco.join(
        str(folder), model=model, inner_optimizer=optimizer, replica=0, **options
    ) as group:
        while not group.done:
            group.step(tokens=5, loss=2.0)
    return group


def test_join_creates_the_group_and_joins_it_again(tmp_path: Path) -> None:
    created = train(tmp_path, settings=SETTINGS)
    assert created.settings == SETTINGS and created.reason == "completed"
    again = train(tmp_path, settings=SETTINGS)
    assert again.document == created.document and again.reason == "completed"
    assert train(tmp_path).document == created.document


def test_concurrent_replicas_get_one_group(tmp_path: Path) -> None:
    """Half of the replicas want other settings: the first creator decides, the others refuse."""
    barrier = threading.Barrier(16)
    joined: list[GroupDocument] = []
    refused: list[str] = []

    def run(number: int) -> None:
        settings = dataclasses.replace(SETTINGS, seed=number % 2)
        barrier.wait()
        try:
            joined.append(check(tmp_path, settings))
        except SettingsMismatch as error:
            refused.append(str(error))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert len(joined) == len(refused) == 8
    assert len({document.run_id for document in joined}) == 1
    assert joined[0] == GroupDocument.read(LocalStore(tmp_path))


def test_a_refusal_names_the_first_settings_that_differ(tmp_path: Path) -> None:
    check(tmp_path)
    wanted = dataclasses.replace(
        SETTINGS, sync_every=4, outer_lr=0.5, inner_lr=0.1, batch_size=4, codec="bf16"
    )
    with pytest.raises(SettingsMismatch) as refused:
        check(tmp_path, wanted)
    message = str(refused.value)
    assert "sync_every: expected 4, found 2; codec: expected bf16, found fp32" in message
    assert "outer_lr: expected 0.5, found 0.7, and 2 more. A group's settings" in message
    assert str(tmp_path) in message and "join without settings" in message


def test_a_fresh_run_refuses_any_group_and_leaves_it_unchanged(tmp_path: Path) -> None:
    check(tmp_path, fresh=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(GroupExists, match=r"expected no group.*which has no result"):
        check(tmp_path, fresh=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_fresh_run_names_the_result_of_the_old_one(tmp_path: Path) -> None:
    train(tmp_path, settings=SETTINGS)
    with pytest.raises(GroupExists, match=r"completed after round 2\. It is not changed.*-2, or"):
        train(tmp_path, settings=SETTINGS, fresh=True)


def test_a_named_fresh_run_is_joined_by_all_its_replicas(tmp_path: Path) -> None:
    first = check(tmp_path, fresh="job-7")
    assert check(tmp_path, fresh="job-7") == first
    with pytest.raises(GroupExists, match=r"expected the run 'job-8'.*found run .* 'job-7'"):
        check(tmp_path, fresh="job-8")


def test_fresh_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fresh: expected the settings"):
        train(tmp_path, fresh=True)
    assert not list(tmp_path.iterdir())


def test_without_conditional_writes_only_an_existing_group_is_joined(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.atomic_create = False
    with pytest.raises(ReplicaError, match=r"no conditional writes.*python -m diloco\.init"):
        create_or_check(store, SETTINGS, clock=FastClock())
    created = diloco.create_group(str(tmp_path), SETTINGS)
    assert create_or_check(store, SETTINGS, clock=FastClock()) == created
