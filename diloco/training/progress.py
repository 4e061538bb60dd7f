"""The report that a training loop gets after each round, for a terminal, a log or a callback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RoundProgress:
    """The result of a round for this replica.

    ``outcome`` is included, late or void. ``loss`` is the weighted mean of the contributors in nats
    per token, None for a void round. ``tokens`` is the total of all committed rounds; ``waited_s``
    is the time for which the training loop was blocked.
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
    """Print one line to standard error."""
    print(progress, file=sys.stderr, flush=True)


def on_round_of(progress: bool | OnRound) -> OnRound | None:
    """Convert the argument ``progress`` of :func:`diloco.join` to a callback."""
    if isinstance(progress, bool):
        return print_round if progress else None
    return progress
