"""Messages between the ranks of one replica.

A message has twelve numbers, summed over the ranks in one all-reduce. The leader (rank 0) sets the
next operation; every rank adds its counts and whether it has failed. So one small collective sends
in both directions, and a step without any other operation costs exactly one. The leader broadcasts
longer data (text, weights) directly after the message that announces it.

The channel uses a separate gloo group on the CPU, independent of the process group of the model.
Nothing is pickled. Every operation has a deadline: if a rank dies, its connections close and the
others fail at once; if a rank hangs, the others fail after ``timeout_s``. Both raise
:class:`~diloco.errors.ReplicaError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp, Work

from diloco.errors import ReplicaError

LEADER = 0
TEXT_BYTES = 2000
"""Maximum bytes of an error message; longer ones are truncated."""


@dataclass(frozen=True, kw_only=True)
class StepMessage:
    """A message, summed over all ranks as fp64, so integers up to 2**53 are exact."""

    # from every rank, summed
    failed: float = 0
    """Ranks that cannot continue."""
    leaving: float = 0
    """Ranks with a shutdown request (a signal)."""
    leave_within_s: float = 0.0
    """Sum of the seconds that these ranks have."""
    gone: float = 0
    """Ranks that have left their training loop without an error."""
    tokens: float = 0
    loss: float = 0.0
    """Sum of loss times tokens."""
    # from the leader
    operation: float = 0
    argument: float = 0
    done: float = 0
    round: float = 0
    schedule_step: float = 0
    data_step: float = 0

    def __add__(self, other: StepMessage) -> StepMessage:
        return StepMessage.of([a + b for a, b in zip(astuple(self), astuple(other), strict=True)])

    @classmethod
    def of(cls, numbers: Sequence[float]) -> StepMessage:
        return cls(**{f.name: n for f, n in zip(fields(cls), numbers, strict=True)})


class CommandChannel:
    """This rank's end of the channel. All ranks of the default process group create it together."""

    def __init__(self, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        self.broken = False
        self._open = True

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    def all_reduce(self, message: StepMessage, *, timeout_s: float | None = None) -> StepMessage:
        """Sum a message over all ranks."""
        numbers = torch.tensor(astuple(message), dtype=torch.float64)
        self._sum(numbers, timeout_s=timeout_s)
        return StepMessage.of(numbers.tolist())

    def text(self, text: str = "") -> str:
        """Broadcast the leader's text; return it on all ranks."""
        data = text.encode() if self.is_leader else b""
        size = torch.tensor([len(data)])
        self.broadcast(size)
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        if data:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if buffer.numel():
            self.broadcast(buffer)
        return bytes(buffer.tolist()).decode()

    def texts(self, text: str) -> list[str]:
        """Gather the texts of all ranks, truncated to :data:`TEXT_BYTES`, on all ranks."""
        data = text.encode(errors="replace")[:TEXT_BYTES]
        rows = torch.zeros(self.size, TEXT_BYTES, dtype=torch.int32)
        rows[self.rank, : len(data)] = torch.tensor(list(data), dtype=torch.int32)
        self._sum(rows)
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows.tolist()]

    def gather(self, text: str) -> list[str]:
        """Gather the texts of all ranks, of any length, on all ranks."""
        data = text.encode()
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self._sum(sizes)
        texts = []
        for rank, size in enumerate(sizes.tolist()):
            buffer = torch.empty(size, dtype=torch.uint8)
            if rank == self.rank and size:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if size:
                self.broadcast(buffer, root=rank)
            texts.append(buffer.numpy().tobytes().decode())
        return texts

    def total(self, number: float) -> float:
        """Return the sum of the numbers of all ranks."""
        total = torch.tensor([number], dtype=torch.float64)
        self._sum(total)
        return float(total)

    def broadcast(self, tensor: Tensor, *, root: int = LEADER) -> None:
        """Broadcast the tensor (CPU, contiguous) of one rank into the tensors of all ranks."""
        options = BroadcastOptions()
        options.rootRank = root
        self._run(options, None, lambda: self._group.broadcast([tensor], options))

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor (CPU, contiguous) to one rank, which receives one of the same size."""
        self._run(None, None, lambda: self._group.send([tensor], to, 0))

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive a tensor from one rank."""
        self._run(None, None, lambda: self._group.recv([tensor], source, 0))

    def _sum(self, tensor: Tensor, *, timeout_s: float | None = None) -> None:
        """Sum a CPU tensor over all ranks, in place."""
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.SUM  # type: ignore[assignment]
        self._run(options, timeout_s, lambda: self._group.allreduce([tensor], options))

    def close(self) -> None:
        """Close the connections; ranks that still wait for this one get an error."""
        if self._open:
            self._open = False
            dist.destroy_process_group(self._group)
            del self._group  # the last reference closes the connections

    def _run(
        self,
        options: AllreduceOptions | BroadcastOptions | None,
        timeout_s: float | None,
        start: Callable[[], Work],
    ) -> None:
        if self.broken or not self._open:
            raise ReplicaError("the channel between the ranks of this replica is closed")
        if options is not None:
            seconds = self.timeout_s if timeout_s is None else timeout_s
            options.timeout = timedelta(seconds=seconds)
        try:
            start().wait()
        except RuntimeError as error:
            self.broken = True
            raise ReplicaError(
                f"rank {self.rank} lost another rank of its replica: {error}"
            ) from None
