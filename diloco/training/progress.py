"""What a training loop is told after each round: for a terminal, a log, a callback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RoundProgress:
    """One round as this replica saw it end.

    ``outcome`` is included, late or void; ``loss`` the contributors' weighted mean in nats per
    token, None of a void round; ``tokens`` all that were ever committed; ``waited_s`` how long the
    training loop stood still.
    """

    round: int
    total_rounds: int
    committed: int
    contributors: int
    outcome: str
    loss: float | None
    tokens: int
    waited_s: float

    def __str__(self) -> str:
        loss = "" if self.loss is None else f"  loss {self.loss:.4f}"
        return (
            f"round {self.round}  {self.committed}/{self.total_rounds} committed  {self.outcome}  "
            f"{self.contributors} contributors{loss}  {self.tokens:,} tokens  "
            f"waited {self.waited_s:.1f} s"
        )


OnRound = Callable[[RoundProgress], None]


def print_round(progress: RoundProgress) -> None:
    """One line per round on the standard error, like other training loops' progress."""
    print(progress, file=sys.stderr, flush=True)


def on_round_of(progress: bool | OnRound) -> OnRound | None:
    """The callback that ``diloco.join(progress=...)`` asks for."""
    if isinstance(progress, bool):
        return print_round if progress else None
    return progress
