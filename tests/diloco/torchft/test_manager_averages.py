"""Reductions of the Manager: every operation, dtype, shape and codec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from diloco.manager import WorldSizeMode
from tests.diloco.manager_harness import Harness, step


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path)
    yield made
    made.close()


def averaged(harness: Harness, tensors: list[Tensor], **how: Any) -> list[Tensor]:
    """One step of one Manager for each tensor."""

    def member(replica: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            manager = harness.make(
                replica,
                min_replica_size=len(tensors),
                init_sync=False,
                heartbeat_interval=timedelta(seconds=100),  # heartbeats count as bytes, too
            )
            assert step(manager, tensors[replica], **how)
            return tensors[replica]

        return run

    return harness.together(*(member(replica) for replica in range(len(tensors))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats_are_averaged_by_default(harness: Harness, dtype: torch.dtype) -> None:
    given = [torch.tensor([[1.0, -2.0], [k, 8.0]], dtype=dtype) for k in range(4)]
    for result in averaged(harness, given):
        assert result.dtype == dtype
        assert result.tolist() == [[1.0, -2.0], [1.5, 8.0]]


@pytest.mark.parametrize(
    ("reduce_op", "expected"),
    [
        (ReduceOp.SUM, [5, 6]),
        (ReduceOp(ReduceOp.SUM), [5, 6]),
        ("sum", [5, 6]),
        ("SUM", [5, 6]),
        (ReduceOp.MAX, [3, 4]),
        (ReduceOp.MIN, [2, 2]),
        (ReduceOp.PRODUCT, [6, 8]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float32])
def test_other_operations(
    harness: Harness, reduce_op: object, expected: list[int], dtype: torch.dtype
) -> None:
    given = [torch.tensor([2, 4], dtype=dtype), torch.tensor([3, 2], dtype=dtype)]
    for result in averaged(harness, given, reduce_op=reduce_op):
        assert result.dtype == dtype
        assert result.tolist() == expected


def test_large_integers_do_not_pass_through_floats(harness: Harness) -> None:
    given = [torch.tensor([2**53 + 1]), torch.tensor([2])]
    assert averaged(harness, given, reduce_op="sum")[1].item() == 2**53 + 3


def test_quantised_tensors_are_close_smaller_and_the_same_for_all(harness: Harness) -> None:
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(10_000, generator=generator) for _ in range(2)]
    exact = (given[0] + given[1]) / 2
    first, second = averaged(harness, given, should_quantize=True)
    assert torch.equal(first, second)
    assert 0 < (first - exact).abs().max() < 0.05
    assert harness.store.usage.bytes_up < 2 * 10_000 * 4 / 3


def test_an_average_of_integers_is_refused(harness: Harness) -> None:
    manager = harness.make(0)
    manager.start_quorum()
    with pytest.raises(ValueError, match="only supported for floating point tensors"):
        manager.allreduce(torch.tensor([1]))
    with pytest.raises(ValueError, match=r"reduce_op: expected one of .* found 'mean'"):
        manager.allreduce(torch.tensor([1.0]), reduce_op="mean")


def test_strided_and_empty_tensors_and_parameters(harness: Harness) -> None:
    manager = harness.make(0)
    manager.start_quorum()
    strided = torch.arange(6.0).view(2, 3).t()
    parameter = torch.nn.Parameter(torch.ones(2))
    for tensor in (strided, torch.empty(0, 3), parameter, torch.tensor(4.0)):
        before = tensor.detach().clone()
        assert manager.allreduce(tensor).wait()
        assert torch.equal(tensor, before)
    assert manager.should_commit()


def test_spares_receive_the_mean_of_the_others(harness: Harness) -> None:
    def member(replica: int) -> Callable[[], list[object]]:
        def run() -> list[object]:
            manager = harness.make(
                replica,
                min_replica_size=2,
                init_sync=False,
                world_size_mode=WorldSizeMode.FIXED_WITH_SPARES,
            )
            while len(harness.managers) < 3:
                harness.clock.sleep(0.1)
            manager.start_quorum()
            tensor = torch.tensor([float(replica + 1)])
            work = manager.allreduce(tensor)
            seen: list[object] = [tensor.item()]
            work.wait()
            seen += [tensor.item(), manager.num_participants(), manager.participating_rank()]
            seen += [manager.is_participating(), manager.should_commit()]
            return [*seen, manager.batches_committed()]

        return run

    assert harness.together(member(0), member(1), member(2)) == [
        [1.0, 1.5, 2, 0, True, True, 2],
        [2.0, 1.5, 2, 1, True, True, 2],
        [0.0, 1.5, 2, None, False, True, 2],
    ]


def test_ranks_average_with_equal_ranks_and_commit_together(harness: Harness) -> None:
    def member(replica: int, rank: int) -> Callable[[], list[object]]:
        def run() -> list[object]:
            manager = harness.make(
                replica, rank=rank, world_size=2, min_replica_size=2, init_sync=False
            )
            seen: list[object] = []
            for attempt in range(2):
                manager.start_quorum()
                tensor = torch.tensor([100.0 * rank + replica])
                manager.allreduce(tensor).wait()
                if (attempt, replica, rank) == (1, 1, 1):
                    manager.report_error(RuntimeError("injected"))
                seen += [tensor.item(), manager.num_participants(), manager.should_commit()]
            return seen

        return run

    results = harness.together(member(0, 0), member(0, 1), member(1, 0), member(1, 1))
    low, high = [0.5, 2, True, 0.5, 2, False], [100.5, 2, True, 100.5, 2, False]
    assert results == [low, high, low, high]
