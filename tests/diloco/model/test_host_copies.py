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
    """A slow GPU executes the copies that are enqueued on its stream only when an event behind them
    is awaited, a fast one at once."""

    def __init__(self, *, is_fast: bool) -> None:
        self.is_fast = is_fast
        self.enqueued: list[Callable[[], object]] = []
        self.pinned: list[int] = []

    def enqueue(self, copy: Callable[[], object]) -> None:
        self.enqueued.append(copy)
        if self.is_fast:
            self.run(1)

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


@pytest.fixture(params=["slow", "fast"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GPU:
    gpu = GPU(is_fast=request.param == "fast")
    copy, empty = Tensor.copy_, torch.empty

    def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return copy(target, source)
        assert target.dtype == source.dtype, "a transfer that converts is not asynchronous"
        into, values = target.as_subclass(Tensor), source.as_subclass(Tensor)
        gpu.enqueue(lambda: copy(into, values))
        return target

    def pinned_empty(numel: int, *, dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
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
    assert gpu.pinned == [min(4, numel)] * (1 if numel <= 4 else 2)
    assert not gpu.enqueued


@pytest.mark.parametrize("changes", [True, False])
@pytest.mark.parametrize("order", ["gc", "cg", "gcg", "ggcg", "ggcgg", "gggc", "cggc"])
def test_tensors_of_both_devices_do_not_share_buffers(order: str, changes: bool, gpu: GPU) -> None:
    """A replica of several ranks reads averaged buffers of a model on GPUs from the CPU."""
    source = torch.arange(6.0 * len(order))
    kept = source.clone()
    parts = zip(order, source.split(6), strict=True)
    tensors = [part.as_subclass(OnGPU) if device == "g" else part for device, part in parts]
    found, places = torch.zeros(source.numel()), []
    for chunk in chunks_on_host(pieces(*tensors), numel=source.numel(), changes=changes):
        found[chunk.where] = chunk.values
        places.append(chunk.where.start)
        if changes:
            chunk.values.fill_(-1.0)
    assert torch.equal(found, kept) and torch.equal(source, kept)
    assert places == sorted(places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 2, 4, 19])
def test_a_buffer_is_not_overwritten_before_it_was_sent(
    numel: int, dtype: torch.dtype, gpu: GPU
) -> None:
    target = torch.zeros(numel, dtype=dtype)
    source = torch.arange(float(numel)) + 0.3
    copy_from_host(target.as_subclass(OnGPU), source)
    assert torch.equal(target, source.to(dtype)), "the copy has ended"
    assert len(gpu.pinned) == min(2, -(-numel // 4)) and max(gpu.pinned, default=0) <= 4


def test_tensors_of_the_cpu_are_not_pinned(gpu: GPU) -> None:
    source = torch.arange(9.0)
    found = torch.zeros(9)
    for chunk in chunks_on_host(pieces(source[:5], source[5:]), numel=9):
        found[chunk.where] = chunk.values
    assert torch.equal(found, source)
    target = torch.zeros(9, dtype=torch.bfloat16)
    copy_from_host(target, source)
    assert torch.equal(target.float(), source)
    assert not gpu.pinned and not gpu.enqueued


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
def test_values_of_another_shape_are_refused(shape: tuple[int, ...], gpu: GPU) -> None:
    target = torch.zeros(2, 3).as_subclass(OnGPU)
    with pytest.raises(ValueError, match=r"expected values of the shape \(2, 3\), found \(3,"):
        copy_from_host(target, torch.ones(shape))
    assert not gpu.enqueued
