"""One step as one member has it: its part in the quorum, and its allreduce calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from diloco.protocol.manager_records import Quorum
from diloco.protocol.manager_rounds import Standing, participants, standing
from diloco.torchft.allreduce_exchange import Exchange
from diloco.torchft.tensor_codec import spec_of
from diloco.torchft.work import ManagedWork


@dataclass(frozen=True, kw_only=True)
class Part:
    """``rank`` of ``size`` participants, None for a member that is none; ``needed`` are those
    without all of whom the step does not count."""

    standing: Standing
    rank: int | None
    size: int
    needed: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How the Manager counts; all members must be set up alike."""

    asynchronous: bool
    spares: bool
    min_replica_size: int
    world_size: int

    def __str__(self) -> str:
        size_mode = "FIXED_WITH_SPARES" if self.spares else "DYNAMIC"
        return (
            f"async_quorum={self.asynchronous} world_size_mode={size_mode} "
            f"min_replica_size={self.min_replica_size} world_size={self.world_size}"
        )

    def part(self, quorum: Quorum, member: int, *, allow_heal: bool) -> Part:
        """With a synchronous quorum who heals has healed before the step, and takes part."""
        healed_take_part = allow_heal and not self.asynchronous
        place = standing(
            quorum,
            member,
            healed_take_part=healed_take_part,
            heal=allow_heal,
            at_most=self.min_replica_size if self.spares else None,
        )
        rank, size = place.newest_rank, place.newest_size
        if healed_take_part:
            rank, size = place.rank, place.size
        if self.spares:
            size = min(size, self.min_replica_size)
            rank = None if rank is None or rank >= self.min_replica_size else rank
        needed = participants(quorum, healed_take_part=healed_take_part)
        return Part(standing=place, rank=rank, size=size, needed=needed)


class Calls:
    """The allreduce calls of a step. ``report`` is told of every failure."""

    def __init__(self, exchange: Exchange, report: Callable[[Exception], None]) -> None:
        self._exchange = exchange
        self._report = report
        self._works: list[ManagedWork] = []

    @property
    def made(self) -> int:
        return self._exchange.calls

    def begin(self, tensor: Tensor, *, op: str, quantise: bool) -> ManagedWork:
        target = tensor.detach()
        try:
            call = self._exchange.submit(target, spec_of(target, op=op, quantise=quantise))
        except Exception as error:
            self._report(error)
            return nothing_to_do(tensor, self._report)

        def finish(timeout_s: float | None) -> None:
            self._exchange.flush()
            target.copy_(call.result.result(timeout_s).view(target.shape))

        work = ManagedWork(tensor, finish, self._report)
        self._works.append(work)
        return work

    def finish(self, failed: Callable[[], bool]) -> None:
        """Wait for what nobody has waited for (torchft's PureDistributedDataParallel does not),
        unless the step has ``failed``."""
        for work in self._works:
            if not failed():
                work.wait()
        if failed():
            self.abandon()
        else:
            self._exchange.close()

    def abandon(self) -> None:
        self._exchange.abandon()


def nothing_to_do(tensor: Tensor, report: Callable[[Exception], None]) -> ManagedWork:
    """The Work of a call that was not made."""
    return ManagedWork(tensor, lambda timeout_s: None, report)
