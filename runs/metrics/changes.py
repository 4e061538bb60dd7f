"""What one tick changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from runs.metrics.blocks import Points


@dataclass
class Changes:
    """What one tick changed, to be published once."""

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
