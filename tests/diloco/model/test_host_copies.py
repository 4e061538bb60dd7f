"""Copies between GPU and host pass through two buffers in turn. A CPU stands in for the GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diloco.model import host_copies
from diloco.model.fragments import Slot
from diloco.model.host_copies import Piece, chunks_on_host, copy_from_host

SLOT = Slot(name="w", shape=(1,), dtype="float32", numel=1, embedding=False)


class GPU:
    """Executes the copies that are enqueued on its stream only when an event behind them is
    awaited, like a slow GPU."""

    def __init__(self) -> None:
        self.enqueued: list[Callable[[], object]] = []
        self.pinned: list[int] = []

    def run(self, count: int) -> None:
        for copy in self.enqueued[:count]:
            copy()
        self.enqueued[:count] = []


class Event:
    def __init__(self, gpu: GPU) -> None:
        self._gpu = gpu
        self._copies: list[Callable[[], object]] = []

    def record(self, stream: object) -> None:
        self._copies = list(self._gpu.enqueued)

    def synchronize(self) -> None:
        left = [copy for copy in self._gpu.enqueued if copy in self._copies]
        self._gpu.run(len(left))


class OnGPU(Tensor):
    """A tensor of the stand-in."""

    is_cuda = True  # type: ignore[assignment]
    device = torch.device("cuda", 0)  # type: ignore[assignment]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GPU:
    gpu = GPU()
    copy, empty = Tensor.copy_, torch.empty

    def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return copy(target, source)
        assert target.dtype == source.dtype, "a transfer that converts is not asynchronous"
        into, values = target.as_subclass(Tensor), source.as_subclass(Tensor)
        gpu.enqueued.append(lambda: copy(into, values))
        return target

    def pinned_empty(numel: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        if pin_memory:
            gpu.pinned.append(numel)
        return empty(numel, dtype=dtype)

    def device_wide(device: object = None) -> None:
        raise AssertionError("expected no wait for other streams")

    monkeypatch.setattr(Tensor, "copy_", copy_)
    monkeypatch.setattr(torch, "empty", pinned_empty)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(gpu))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", device_wide)
    monkeypatch.setattr(host_copies, "CHUNK", 4)
    return gpu


def pieces(*tensors: Tensor) -> list[Piece]:
    at, found = 0, []
    for tensor in tensors:
        found.append(Piece(slot=SLOT, values=tensor, at=at))
        at += tensor.numel()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(3,), (11,), (1, 9, 4, 2)])
def test_chunks_have_arrived_when_they_are_read(
    sizes: tuple[int, ...], dtype: torch.dtype, gpu: GPU
) -> None:
    numel = sum(sizes)
    source = torch.arange(float(numel)).to(dtype)
    found = torch.zeros(numel)
    on_gpu = [tensor.as_subclass(OnGPU) for tensor in source.split(list(sizes))]
    for chunk in chunks_on_host(pieces(*on_gpu), numel=numel):
        found[chunk.where] = chunk.values
        chunk.values.fill_(-1.0)  # the reader may change it
    assert torch.equal(found, source.float())
    assert len(gpu.pinned) == 2 and max(gpu.pinned) <= 4, "two small buffers"
    assert not gpu.enqueued


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [2, 4, 19])
def test_a_buffer_is_not_overwritten_before_it_was_sent(
    numel: int, dtype: torch.dtype, gpu: GPU
) -> None:
    target = torch.zeros(numel, dtype=dtype)
    source = torch.arange(float(numel)) + 0.3
    copy_from_host(target.as_subclass(OnGPU), source)
    gpu.run(len(gpu.enqueued))
    assert torch.equal(target, source.to(dtype))
    assert len(gpu.pinned) == 2 and max(gpu.pinned) <= 4


def test_tensors_of_the_cpu_use_one_buffer_that_is_not_pinned(gpu: GPU) -> None:
    source = torch.arange(9.0)
    found = torch.zeros(9)
    for chunk in chunks_on_host(pieces(source[:5], source[5:]), numel=9):
        found[chunk.where] = chunk.values
    assert torch.equal(found, source)
    target = torch.zeros(9, dtype=torch.bfloat16)
    copy_from_host(target, source)
    assert torch.equal(target.float(), source)
    assert not gpu.pinned and not gpu.enqueued
