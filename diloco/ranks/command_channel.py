"""How the ranks of one replica talk: one word at a time, all of them at once.

A *word* is twelve numbers, summed over the ranks in one all-reduce: the leader (rank 0) puts in
what the others should do next, the others what they have counted and whether they have failed. So
one small collective both tells and asks, and a step in which nothing happens costs exactly one.
Longer things (text, weights) are broadcast by the leader right after the word that announces them.

It runs over a gloo group of its own, on the CPU, whatever the model's ranks use among themselves.
Nothing is pickled. Every operation has a deadline, so that a rank never waits for ever: a rank
that dies closes its connections, which the others see at once; one that stands still is given up
after ``timeout_s``. Either is a :class:`~diloco.errors.ReplicaError`.
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
"""Longer error messages are cut."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """What all ranks learn together. Whole numbers up to 2**53 are exact (they travel as fp64)."""

    # from every rank, summed
    failed: float = 0
    """Ranks that cannot go on."""
    leaving: float = 0
    """Ranks that were asked to leave (a signal)."""
    leave_within_s: float = 0.0
    """How long these have, added up."""
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

    def __add__(self, other: Word) -> Word:
        return Word.of([a + b for a, b in zip(astuple(self), astuple(other), strict=True)])

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Word:
        return cls(**{f.name: n for f, n in zip(fields(cls), numbers, strict=True)})


class Channel:
    """One rank's end. Made on all ranks at once, over the default process group's ranks."""

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

    def say(self, word: Word, *, timeout_s: float | None = None) -> Word:
        """Sum a word over all ranks."""
        numbers = torch.tensor(astuple(word), dtype=torch.float64)
        self._sum(numbers, timeout_s=timeout_s)
        return Word.of(numbers.tolist())

    def text(self, text: str = "") -> str:
        """The leader's text, on all ranks."""
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
        """Every rank's text, cut to :data:`TEXT_BYTES`, on all ranks."""
        data = text.encode()[:TEXT_BYTES]
        rows = torch.zeros(self.size, TEXT_BYTES, dtype=torch.int32)
        rows[self.rank, : len(data)] = torch.tensor(list(data), dtype=torch.int32)
        self._sum(rows)
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows.tolist()]

    def broadcast(self, tensor: Tensor) -> None:
        """The leader's tensor (CPU, contiguous) into everybody's, in place."""
        options = BroadcastOptions()
        options.rootRank = LEADER
        self._run(options, None, lambda: self._group.broadcast([tensor], options))

    def _sum(self, tensor: Tensor, *, timeout_s: float | None = None) -> None:
        """Sum a CPU tensor over all ranks, in place."""
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.SUM  # type: ignore[assignment]
        self._run(options, timeout_s, lambda: self._group.allreduce([tensor], options))

    def close(self) -> None:
        """Part from the other ranks; whoever still waits for this one is told so by an error."""
        if self._open:
            self._open = False
            dist.destroy_process_group(self._group)

    def _run(
        self,
        options: AllreduceOptions | BroadcastOptions,
        timeout_s: float | None,
        start: Callable[[], Work],
    ) -> None:
        if self.broken or not self._open:
            raise ReplicaError("the ranks of this replica have parted already")
        options.timeout = timedelta(seconds=self.timeout_s if timeout_s is None else timeout_s)
        try:
            start().wait()
        except RuntimeError as error:
            self.broken = True
            raise ReplicaError(
                f"rank {self.rank} lost another rank of its replica: {error}"
            ) from None
