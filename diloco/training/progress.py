"""The report that a training loop gets after each round, for a terminal, a log or a callback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
OnStatus = Callable[[str], None]
"""Called with what a replica waits for before its first round."""


def ignore_status(status: str) -> None:
    """Print nothing."""


def print_line(progress: RoundProgress | str) -> None:
    """Print one line to standard error."""
    print(progress, file=sys.stderr, flush=True)


class ProgressBar:
    """A bar of tqdm over the rounds of the run, with lines for what the replica waits for."""

    def __init__(self, make_bar: Callable[..., Any]) -> None:
        self._make_bar = make_bar
        self._bar: Any = None

    def on_round(self, progress: RoundProgress) -> None:
        if self._bar is None:
            self._bar = self._make_bar(
                total=progress.total_rounds, initial=progress.committed, unit="round"
            )
        loss = "" if progress.loss is None else f"loss {progress.loss:.4f}, "
        self._bar.n = progress.committed
        self._bar.set_postfix_str(f"{loss}{progress.contributors} contributors")
        if progress.committed >= progress.total_rounds:
            self._bar.close()

    def on_status(self, status: str) -> None:
        self._make_bar.write(status, file=sys.stderr)  # type: ignore[attr-defined]


def callbacks_of(progress: bool | OnRound) -> tuple[OnRound | None, OnStatus]:
    """Convert the argument ``progress`` of :func:`diloco.join` to callbacks.

    True is a bar on a terminal if tqdm is installed, else a line per round.
    """
    if not isinstance(progress, bool):
        return progress, ignore_status
    if not progress:
        return None, ignore_status
    if sys.stderr.isatty():
        with contextlib.suppress(ModuleNotFoundError):
            from tqdm import tqdm

            bar = ProgressBar(tqdm)
            return bar.on_round, bar.on_status
    return print_line, print_line
