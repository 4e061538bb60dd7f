"""Our Manager produces the histories of torchft's, and the comparison detects broken Managers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.matrix import matrix
from tests.torchft.wheel import need_torchft

need_torchft()

from diloco.manager import Manager  # noqa: E402
from diloco.torchft.work import LazyFuture, ManagedWork  # noqa: E402
from tests.torchft.paired_training import (  # noqa: E402
    History,
    Training,
    train_with_archipelago,
    train_with_torchft,
)

STREAMING = {"sync_every": 4, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
TRAININGS = {
    "ddp": Training("ddp", asynchronous=True),
    "ddp, synchronous": Training("ddp", fails_at=3),
    "our ddp": Training("our ddp", asynchronous=True),
    "our pure ddp": Training("our pure ddp", fails_at=3),
    "LocalSGD": Training("local_sgd", fails_at=2),
    "DiLoCo": Training("diloco", {"sync_every": 2}, fails_at=4),
    "DiLoCo, in buckets": Training("diloco", {"sync_every": 2, "use_bucketization": True}),
    "Streaming DiLoCo": Training("diloco", STREAMING, fails_at=3),
}


def assert_same(actual: list[History], expected: list[History]) -> None:
    for replica, (one, other) in enumerate(zip(actual, expected, strict=True)):
        for step, (own, reference) in enumerate(zip(one, other, strict=True)):
            where = f"replica {replica} after step {step}"
            assert own[:2] == reference[:2], where
            torch.testing.assert_close(own[2], reference[2], msg=lambda m, at=where: f"{at}: {m}")


@matrix("name", TRAININGS, fast=("ddp, synchronous", "Streaming DiLoCo"))
def test_histories_are_the_same(name: str, tmp_path: Path) -> None:
    expected = train_with_torchft(TRAININGS[name])
    assert expected[0][-1][0] > 1
    assert_same(train_with_archipelago(TRAININGS[name], tmp_path), expected)


def never_communicating(manager: type[Manager]) -> type[Manager]:
    class Broken(manager):  # type: ignore[misc, valid-type]
        def allreduce(self, tensor: Any, *arguments: Any, **given: Any) -> ManagedWork:
            self.wait_quorum()
            return ManagedWork(tensor, lambda timeout_s: None, self.report_error)

    return Broken


def stepping_in_start_quorum(manager: type[Manager]) -> type[Manager]:
    class Broken(manager):  # type: ignore[misc, valid-type]
        def start_quorum(self, *arguments: Any, **given: Any) -> None:
            super().start_quorum(*arguments, **given)
            self.wait_quorum()
            self._step += 1

        def should_commit(self, *arguments: Any, **given: Any) -> bool:
            committed = super().should_commit(*arguments, **given)
            self._step -= committed
            return committed

    return Broken


def sum_for_average(manager: type[Manager]) -> type[Manager]:
    class Broken(manager):  # type: ignore[misc, valid-type]
        def allreduce(self, tensor: Any, *arguments: Any, **given: Any) -> ManagedWork:
            return super().allreduce(tensor, *arguments, **given | {"reduce_op": "sum"})

    return Broken


def no_initial_sync(manager: type[Manager]) -> type[Manager]:
    class Broken(manager):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **given: Any) -> None:
            super().__init__(*arguments, **given | {"init_sync": False})

    return Broken


def healed_sends_zeros(manager: type[Manager]) -> type[Manager]:
    class Broken(manager):  # type: ignore[misc, valid-type]
        healed = False

        def _recover(self, quorum: Any, place: Any) -> None:
            super()._recover(quorum, place)
            self.healed = place.heals

        def allreduce(self, tensor: Any, *arguments: Any, **given: Any) -> ManagedWork:
            if self.healed:
                tensor.detach().zero_()
            return super().allreduce(tensor, *arguments, **given)

    return Broken


def commit_never_fails(manager: type[Manager]) -> type[Manager]:
    class Broken(manager):  # type: ignore[misc, valid-type]
        def should_commit(self, *arguments: Any, **given: Any) -> bool:
            self._errored = None
            return super().should_commit(*arguments, **given)

    return Broken


def eager_callbacks(manager: type[Manager]) -> type[Manager]:
    class Eager(LazyFuture):
        def then(self, callback: Any) -> LazyFuture:
            callback(self)
            return self

    class Broken(manager):  # type: ignore[misc, valid-type]
        def allreduce(self, *arguments: Any, **given: Any) -> ManagedWork:
            work = super().allreduce(*arguments, **given)
            work.tail = Eager(work)
            return work

    return Broken


@matrix(
    ("broken", "name"),
    [
        (never_communicating, "ddp"),
        (never_communicating, "DiLoCo"),
        (stepping_in_start_quorum, "Streaming DiLoCo"),
        (stepping_in_start_quorum, "LocalSGD"),
        (sum_for_average, "LocalSGD"),
        (sum_for_average, "DiLoCo"),
        (no_initial_sync, "LocalSGD"),
        (no_initial_sync, "DiLoCo"),
        (healed_sends_zeros, "DiLoCo"),
        (commit_never_fails, "ddp, synchronous"),
        (commit_never_fails, "Streaming DiLoCo"),
        (eager_callbacks, "DiLoCo, in buckets"),
    ],
    fast=2,
)
def test_broken_manager_is_detected(
    broken: Callable[[type[Manager]], type[Manager]], name: str, tmp_path: Path
) -> None:
    expected = train_with_archipelago(TRAININGS[name], tmp_path / "correct")
    with pytest.raises(AssertionError):
        assert_same(train_with_archipelago(TRAININGS[name], tmp_path / "broken", broken), expected)
