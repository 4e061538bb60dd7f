"""The participation of a member in the quorum of a step."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.protocol.manager_records import Quorum
from diloco.protocol.manager_rounds import MemberView, member_view, participants


@dataclass(frozen=True, kw_only=True)
class Part:
    """The participation of one member in a quorum: ``rank`` among ``size`` participants (None if it
    does not participate). The step is committed only if all members in ``needed`` succeed."""

    standing: MemberView
    rank: int | None
    size: int
    needed: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How participants are counted; all members must have equal modes."""

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
        """Return the part of a member. With a synchronous quorum, healing members participate,
        because they heal before the step."""
        healed_take_part = allow_heal and not self.asynchronous
        place = member_view(
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
