"""Changes of one tick, for the live stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from runs.metrics.blocks import Points


@dataclass
class Changes:
    """The parts of a run that one tick changed, published together at its end."""

    run: bool = False
    replicas: bool = False
    rounds: set[int] = field(default_factory=set)
    points: list[tuple[str, int | None, Points]] = field(default_factory=list)

    def add(self, other: Changes) -> None:
        self.run |= other.run
        self.replicas |= other.replicas
        self.rounds |= other.rounds
        self.points += other.points

    def __bool__(self) -> bool:
        return bool(self.run or self.replicas or self.rounds or self.points)
