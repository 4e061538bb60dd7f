"""Synchronous data parallel training through a Manager: gradients are averaged at every step.

Use it as the baseline for DiLoCo, or for replicas with a fast connection. Both wrappers take any
manager with torchft's ``allreduce(tensor) -> Work``: :class:`diloco.Manager`, which uses an object
store, or torchft's own. The manager decides which replicas participate and divides by their number.

:class:`DistributedDataParallel` reduces gradients in buckets during the backward pass, in the same
order on every replica. :class:`PureDistributedDataParallel` reduces each parameter separately. Both
have finished when ``backward()`` returns.

Neither broadcasts parameters at the start, and neither ever broadcasts buffers. The manager's
healing does the former; without it, create all replicas from one seed or one checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

MIB = 2**20
BUCKET_MIB = 25.0
FIRST_BUCKET_MIB = 1.0
"""MiB of the first bucket; small, so that the exchange starts early in the backward pass."""


class Work(Protocol):
    """An all-reduce in progress."""

    def wait(self) -> Any: ...


class AllReducer(Protocol):
    """The part of a manager used here. Waiting for the work averages the tensor in place."""

    def allreduce(self, tensor: Tensor) -> Work: ...


@dataclass
class GradBucket:
    """Gradients that are reduced together.

    ``buffer`` has shape (n,), one dtype and one device; it holds the gradients of ``parameters``
    one after the other.
    """

    index: int
    parameters: list[nn.Parameter]
    buffer: Tensor
    is_last: bool = False
    _ready: set[int] = field(default_factory=set)

    def gradients(self) -> list[Tensor]:
        """Return views into the buffer, shaped like the parameters."""
        sizes = [parameter.numel() for parameter in self.parameters]
        pieces = torch.split(self.buffer, sizes)
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]


CommHook = Callable[[Any, GradBucket], Work]
"""``hook(state, bucket)`` starts reducing ``bucket.buffer`` in place."""


class _Wrapper(nn.Module):
    """Forward to ``module`` and reduce its gradients at the end of the backward pass."""

    def __init__(self, manager: AllReducer, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._manager = manager
        self._synchronising = True
        self._queued = False
        self._trained = [p for p in module.parameters() if p.requires_grad]
        if not self._trained:
            raise ValueError("expected a module with trainable parameters, found none")
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients; the next backward pass outside the block reduces the sum."""
        before, self._synchronising = self._synchronising, False
        try:
            yield
        finally:
            self._synchronising = before

    @torch.no_grad()
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._synchronising:
            return
        if not self._queued:
            self._queued = True
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end)
        self._ready(parameter)

    def _end(self) -> None:
        self._queued = False
        with torch.no_grad():
            self._finish()

    def _ready(self, parameter: nn.Parameter) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError


class PureDistributedDataParallel(_Wrapper):
    """One all-reduce per parameter, awaited at the end of the backward pass.

    Parameters without a gradient are skipped, so all replicas must use the same parameters.
    """

    def __init__(self, manager: AllReducer, module: nn.Module) -> None:
        super().__init__(manager, module)
        self._under_way: list[Work] = []

    def _ready(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._under_way.append(self._manager.allreduce(parameter.grad))

    def _finish(self) -> None:
        works, self._under_way = self._under_way, []
        for work in works:
            work.wait()


class DistributedDataParallel(_Wrapper):
    """Gradients in buckets of up to ``bucket_cap_mb`` MiB, reduced during the backward pass.

    A parameter without a gradient contributes zeros; it receives a gradient if another replica had
    one.
    """

    def __init__(
        self, manager: AllReducer, module: nn.Module, *, bucket_cap_mb: float = BUCKET_MIB
    ) -> None:
        super().__init__(manager, module)
        if bucket_cap_mb <= 0:
            raise ValueError(f"expected bucket_cap_mb above 0, found {bucket_cap_mb}")
        self.buckets = _buckets(self._trained, bucket_cap_mb * MIB)
        self._bucket_of = {
            id(parameter): bucket for bucket in self.buckets for parameter in bucket.parameters
        }
        self._hook: tuple[CommHook, Any] = (
            lambda state, bucket: self._manager.allreduce(bucket.buffer),
            None,
        )
        self._under_way: list[Work] = []

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce buckets by ``hook(state, bucket)`` instead of ``manager.allreduce``."""
        self._hook = (hook, state)

    def _ready(self, parameter: nn.Parameter) -> None:
        self._bucket_of[id(parameter)]._ready.add(id(parameter))
        self._begin(lambda bucket: len(bucket._ready) == len(bucket.parameters))

    def _begin(self, ready: Callable[[GradBucket], bool]) -> None:
        """Start every bucket that is ready, in order; all replicas must use the same order."""
        hook, state = self._hook
        for bucket in self.buckets[len(self._under_way) :]:
            if not ready(bucket):
                return
            for gradient, parameter in zip(bucket.gradients(), bucket.parameters, strict=True):
                if parameter.grad is None:
                    gradient.zero_()
                else:
                    gradient.copy_(parameter.grad)
            self._under_way.append(hook(state, bucket))

    def _finish(self) -> None:
        self._begin(lambda bucket: True)
        works, self._under_way = self._under_way, []
        for work, bucket in zip(works, self.buckets, strict=True):
            work.wait()
            bucket._ready.clear()
            for gradient, parameter in zip(bucket.gradients(), bucket.parameters, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(gradient)
                elif bool(gradient.any()):
                    parameter.grad = gradient.clone()


def _buckets(parameters: list[nn.Parameter], cap_bytes: float) -> list[GradBucket]:
    """Group neighbouring parameters of one dtype and device, in reverse order of registration,
    which is about the order of the backward pass."""
    groups: list[list[nn.Parameter]] = []
    filled = 0.0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        cap = min(cap_bytes, FIRST_BUCKET_MIB * MIB) if len(groups) <= 1 else cap_bytes
        like = bool(groups) and (groups[-1][0].dtype, groups[-1][0].device) == (
            parameter.dtype,
            parameter.device,
        )
        if not like or (filled and filled + size > cap):
            groups.append([])
            filled = 0.0
        groups[-1].append(parameter)
        filled += size
    return [
        GradBucket(
            index=index,
            parameters=group,
            buffer=torch.zeros(
                sum(p.numel() for p in group), dtype=group[0].dtype, device=group[0].device
            ),
            is_last=index == len(groups) - 1,
        )
        for index, group in enumerate(groups)
    ]
