"""ObjectStoreAllReduce: ranks are threads over one folder."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.allreduce import ObjectStoreAllReduce
from diloco.exchange.checked_blocks import BadPayload
from diloco.store.base import LocalStore
from diloco.store.metered import MeteredStore
from tests.diloco.clocks import FastClock


def make(
    uri: str | Path, rank: int, size: int, timeout_s: float = 30_000.0
) -> ObjectStoreAllReduce:
    return ObjectStoreAllReduce(str(uri), rank, size, timeout_s=timeout_s, clock=FastClock())


def together(size: int, work: Callable[[int], object]) -> list[Any]:
    """Call ``work(rank)`` on all ranks in parallel; return each result or exception."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, rank) for rank in range(size)]
        return [future.exception(600) or future.result() for future in futures]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def mean_in_order(tensors: list[Tensor]) -> Tensor:
    """The definition: sum in fp32 (float64 in float64) in rank order, divide, cast back."""
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    total = torch.zeros(tensors[0].shape, dtype=wide)
    for tensor in tensors:
        total = total + tensor.to(wide)
    return (total / len(tensors)).to(tensors[0].dtype)


def test_tensors_of_every_kind_are_averaged_in_place(tmp_path: Path) -> None:
    kinds: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((5, 3), torch.float32),
        ((), torch.float32),
        ((0, 4), torch.float32),
        ((), torch.bfloat16),
        ((7,), torch.bfloat16),
        ((2, 2), torch.float16),
        ((3, 1, 2), torch.float64),
    ]

    def work(rank: int) -> list[Tensor]:
        reduce = make(tmp_path, rank, 3)
        averages = []
        for index, (shape, dtype) in enumerate(kinds):
            tensor = values(rank, shape, dtype)
            averages.append(reduce.allreduce(tensor, f"kind.{index}"))
            assert averages[-1] is tensor
        parameter = torch.nn.Parameter(values(rank, (4,), torch.float32))
        assert reduce.allreduce(parameter) is parameter
        transposed = values(rank, (5, 3), torch.float32).t()
        whole = torch.zeros(6)
        strided = whole[::2]
        strided += rank
        return [
            *averages,
            parameter.detach(),
            reduce.allreduce(transposed),
            reduce.allreduce(strided),
            whole,
        ]

    results = together(3, work)
    for rank in range(3):
        result = results[rank]
        assert isinstance(result, list), repr(result)
        for (shape, dtype), averaged in zip(kinds, result, strict=False):
            expected = mean_in_order([values(r, shape, dtype) for r in range(3)])
            assert averaged.dtype == dtype and torch.equal(averaged, expected), (shape, dtype)
        parameter, transposed, strided, whole = result[len(kinds) :]
        assert torch.equal(
            parameter, mean_in_order([values(r, (4,), torch.float32) for r in range(3)])
        )
        five_three = mean_in_order([values(r, (5, 3), torch.float32) for r in range(3)])
        assert torch.equal(transposed, five_three.t())
        assert strided.tolist() == [1.0, 1.0, 1.0]
        assert whole.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0], "the gaps are untouched"


def test_a_world_of_one_needs_no_store(tmp_path: Path) -> None:
    tensor = torch.tensor([1.5])
    assert make(tmp_path / "never", 0, 1).allreduce(tensor) is tensor
    assert tensor.item() == 1.5 and not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("rank", "size", "more", "message"),
    [
        (0, 0, {}, "world_size: expected at least 1, found 0"),
        (2, 2, {}, "rank: expected 0 to 1, found 2"),
        (-1, 2, {}, "rank: expected 0 to 1, found -1"),
        (0, 2, {"timeout_s": 0.0}, "timeout_s: expected more than 0"),
        (0, 2, {"poll_interval_s": -1.0}, "poll_interval_s: expected more than 0"),
        (0, 2, {"round_id": "../x"}, "round_id: expected letters"),
        (0, 2, {"round_id": ""}, "round_id: expected letters"),
    ],
)
def test_invalid_arguments_are_refused(
    tmp_path: Path, rank: int, size: int, more: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ObjectStoreAllReduce(str(tmp_path), rank, size, **more)  # type: ignore[arg-type]


def test_a_tensor_or_name_that_cannot_be_averaged_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    reduce = make(tmp_path / "run", 0, 2)
    with pytest.raises(ValueError, match=r"dtype: expected one of .*, found torch.int64"):
        reduce.allreduce(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="name: expected letters"):
        reduce.allreduce(torch.zeros(2), "a/b")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("other", "name", "message"),
    [
        (torch.zeros(3), None, r"expected shape \(2, 2\) as on this rank, found \(3,\) on rank 1"),
        (
            torch.zeros(2, 2).double(),
            None,
            "expected dtype torch.float32 .* torch.float64 on rank 1",
        ),
        (torch.zeros(2, 2), "other", "expected name None as on this rank, found other on rank 1"),
    ],
)
def test_calls_that_differ_are_an_error_on_every_rank(
    tmp_path: Path, other: Tensor, name: str | None, message: str
) -> None:
    def work(rank: int) -> None:
        reduce = make(tmp_path, rank, 2)
        if rank == 0:
            tensor = torch.ones(2, 2)
            try:
                reduce.allreduce(tensor)
            finally:
                assert torch.equal(tensor, torch.ones(2, 2)), "untouched by a call that failed"
        with pytest.raises(ValueError, match=r"found .* on rank 0"):
            reduce.allreduce(other, name)
        with pytest.raises(RuntimeError, match="an earlier call failed"):
            reduce.allreduce(other, name)

    first, second = together(2, work)
    assert isinstance(first, ValueError)
    with pytest.raises(ValueError, match=message):
        raise first
    assert second is None


def test_world_sizes_that_differ_are_an_error_on_every_rank(tmp_path: Path) -> None:
    alone = threading.Event()

    class UntilSeen(FastClock):
        """Rank 0 reads once too early, and again only when rank 1 has read its session."""

        def sleep(self, seconds: float) -> None:
            alone.set()
            peer = tmp_path / "allreduce/default/sessions/00001.json"
            while not peer.exists() or '"0": ' not in peer.read_text():
                time.sleep(0.001)

    def work(rank: int) -> None:
        clock = FastClock() if rank else UntilSeen()
        assert rank == 0 or alone.wait(600)
        ObjectStoreAllReduce(str(tmp_path), rank, 2 + rank, timeout_s=100.0, clock=clock).allreduce(
            torch.zeros(1)
        )

    result = together(2, work)
    assert "world_size: expected 2 on every rank, found 3 on rank 1" in str(result[0])
    assert "world_size: expected 3 on every rank, found 2 on rank 0" in str(result[1])


def average(uri: Path, size: int, offset: float) -> list[float]:
    """A run of ``size`` ranks with two calls."""

    def work(rank: int) -> float:
        reduce = make(uri, rank, size)
        reduce.allreduce(torch.tensor([0.0]))
        return reduce.allreduce(torch.tensor([offset + rank])).item()

    result = together(size, work)
    assert all(isinstance(value, float) for value in result), result
    return result


def test_a_second_run_under_one_uri_never_reads_the_first(tmp_path: Path) -> None:
    assert average(tmp_path, 3, 10.0) == [11.0] * 3
    left = {info.key for info in LocalStore(tmp_path).list("") if info.key.endswith(".bin")}
    assert len(left) == 3, "the payloads of the last call, one per rank"
    assert average(tmp_path, 3, 20.0) == [21.0] * 3
    now = {info.key for info in LocalStore(tmp_path).list("") if info.key.endswith(".bin")}
    assert len(now) == 3 and not now & left, "leftovers are deleted"


def test_a_single_restarted_rank_times_out(tmp_path: Path) -> None:
    """All sessions and payloads of the first run exist, and none is used."""

    def work(rank: int) -> None:
        make(tmp_path, rank, 2).allreduce(torch.ones(1))

    assert together(2, work) == [None, None]
    lone = torch.zeros(1)
    with pytest.raises(TimeoutError, match="rank 1 is from an earlier run"):
        make(tmp_path, 0, 2, timeout_s=20.0).allreduce(lone)
    assert lone.item() == 0.0


def test_a_rank_that_restarts_between_calls_is_not_averaged(tmp_path: Path) -> None:
    survivors = [make(tmp_path, rank, 2) for rank in range(2)]
    assert together(2, lambda rank: survivors[rank].allreduce(torch.ones(1)).item()) == [1.0, 1.0]
    survivors[0].timeout_s = 20.0
    restarted = make(tmp_path, 1, 2, timeout_s=20.0)
    result = together(2, lambda rank: [survivors[0], restarted][rank].allreduce(torch.ones(1)))
    assert all(isinstance(error, TimeoutError) for error in result), result
    assert "call 2: expected the tensors of 2 ranks within 20 s, found none of ranks [1]" in str(
        result[0]
    )


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="rank 1 is missing; rank 2 is missing"):
        make(tmp_path, 0, 3, timeout_s=5.0).allreduce(torch.ones(1))


def test_instances_with_different_round_ids_are_independent(tmp_path: Path) -> None:
    def work(rank: int) -> list[float]:
        reducers = [
            ObjectStoreAllReduce(str(tmp_path), rank, 2, round_id=round_id, clock=FastClock())
            for round_id in ("a", 7)
        ]
        order = reducers if rank else reducers[::-1]
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(
                lambda: order[0].allreduce(torch.tensor(float(order[0] is reducers[0])))
            )
            two = pool.submit(
                lambda: order[1].allreduce(torch.tensor(float(order[1] is reducers[0])))
            )
            result = {id(order[0]): one.result(600).item(), id(order[1]): two.result(60).item()}
        return [result[id(reducer)] for reducer in reducers]

    assert together(2, work) == [[1.0, 0.0]] * 2


def test_the_number_of_objects_is_bounded(tmp_path: Path) -> None:
    most = 0
    lock = threading.Lock()

    def work(rank: int) -> None:
        nonlocal most
        reduce = make(tmp_path, rank, 3)
        for _ in range(6):
            reduce.allreduce(torch.ones(3))
            with lock:
                most = max(most, sum(k.key.endswith(".bin") for k in LocalStore(tmp_path).list("")))

    assert together(3, work) == [None] * 3
    assert most <= 2 * 3


@pytest.mark.parametrize("damage", ["flipped", "truncated", "foreign", "another rank's"])
def test_a_damaged_payload_is_refused(tmp_path: Path, damage: str) -> None:
    class Damaging(LocalStore):
        def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
            raw = bytes(data)
            if key.endswith("/00001.bin"):
                raw = {
                    "flipped": raw[:-1] + bytes([raw[-1] ^ 1]),
                    "truncated": raw[:-1],
                    "foreign": b"PK\x03\x04" + raw,
                    "another rank's": raw.replace(b'"rank": 1', b'"rank": 0'),
                }[damage]
            super().put(key, raw)

    def work(rank: int) -> None:
        ObjectStoreAllReduce(
            "unused", rank, 2, store=Damaging(tmp_path), clock=FastClock()
        ).allreduce(torch.ones(2))

    first, second = together(2, work)
    assert isinstance(first, BadPayload) and "rank 1: expected" in str(first)
    assert second is None


def test_an_invalid_session_object_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for text in ("[]", "{", json.dumps({"session": 1, "world_size": 2, "seen": {}})):
        store.put("allreduce/default/sessions/00001.json", text.encode())
        with pytest.raises(BadPayload, match="expected a session"):
            make(tmp_path, 0, 2).allreduce(torch.ones(1))


def test_over_a_real_s3_server(s3_uri: str) -> None:
    def work(rank: int) -> list[float]:
        reduce = ObjectStoreAllReduce(s3_uri, rank, 2, timeout_s=60.0, poll_interval_s=0.1)
        first = reduce.allreduce(torch.tensor([2.0 * rank, 4.0]), "weights")
        return first.tolist() + reduce.allreduce(torch.tensor([1.0 - rank])).tolist()

    assert together(2, work) == [[1.0, 4.0, 0.5]] * 2


def test_it_is_exported_lazily() -> None:
    code = (
        "import sys, diloco\n"
        "assert 'torch' not in sys.modules\n"
        "assert diloco.ObjectStoreAllReduce.__module__ == 'diloco.allreduce'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_oversized_payload_is_not_read_completely(tmp_path: Path) -> None:
    """If another rank's tensor is larger, the error names its shape; few kilobytes are read."""

    def call(rank: int) -> None:
        shape = (4,) if rank == 0 else (3_000_000,)
        ranks[rank].allreduce(torch.zeros(shape))

    ranks = [make(tmp_path, rank, 2) for rank in range(2)]
    metered = MeteredStore(ranks[0].store)
    ranks[0]._store.inner = metered
    result = together(2, call)
    assert isinstance(result[0], ValueError) and "(3000000,)" in str(result[0])
    assert metered.usage.bytes_down < 1_000_000
