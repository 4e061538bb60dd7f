"""What a replica has done: the books of the inner loop.

Everything is counted from the start of the process; a :class:`Mark` is a place in the books, and
the work *since* a mark is what a contribution stands for. Each fragment has the mark of its base,
which survives a round that was missed or void.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diloco.clock import Clock
from diloco.telemetry.writer import Number


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """What a replica did since its base; ``loss`` is the mean over its steps. ``new_tokens`` are
    those that no earlier contribution of its has counted."""

    tokens: int
    new_tokens: int
    steps: int
    loss: float
    compute_s: float


@dataclass(frozen=True, order=True)
class Mark:
    """Cumulative counts at one moment."""

    steps: int = 0
    tokens: int = 0
    compute_s: float = 0.0


class Work:
    """Counts inner steps. Losses are kept as they are (perhaps on a GPU) until they are needed."""

    def __init__(self, clock: Clock, *, fragments: int = 1) -> None:
        self._clock = clock
        self.now = Mark()
        self.steps_in_round = 0
        self.round_started_wall_s = 0.0
        self._bases = [Mark()] * fragments
        self._uncounted_tokens = 0
        self._step_started_s = 0.0
        self._round_started = Mark()
        self._losses: deque[Tensor] = deque()
        self._losses_from = 0  # steps before the first loss that is kept

    def begin_round(self, *, made: int = 0) -> None:
        """``made`` steps of it were made, and contributed, by an earlier process."""
        self.steps_in_round = made
        self._round_started = self.now
        self.round_started_wall_s = self._clock.wall()
        self.resume()

    def resume(self) -> None:
        """The next inner step begins now; what went before was not compute."""
        self._step_started_s = self._clock.monotonic()

    def count(self, *, tokens: int, loss: Number) -> float:
        """Count one step that has just ended; returns its duration in seconds. Raises
        :class:`ValueError` for a negative count of tokens or a loss that is no scalar."""
        if tokens < 0:
            raise ValueError(f"tokens: expected 0 or more, found {tokens}")
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(
                f"loss: expected a scalar, the step's mean loss, found a tensor of shape "
                f"{tuple(loss.shape)}; pass loss.mean()"
            )
        now_s = self._clock.monotonic()
        step_s, self._step_started_s = now_s - self._step_started_s, now_s
        self.now = Mark(self.now.steps + 1, self.now.tokens + tokens, self.now.compute_s + step_s)
        self.steps_in_round += 1
        self._uncounted_tokens += tokens
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss))
        return step_s

    def count_more(self, tokens: int) -> None:
        """The step that was counted last had these tokens too, on other ranks of the replica."""
        self.now = replace(self.now, tokens=self.now.tokens + tokens)
        self._uncounted_tokens += tokens

    @property
    def compute_in_round_s(self) -> float:
        return self.now.compute_s - self._round_started.compute_s

    @property
    def tokens_in_round(self) -> int:
        return self.now.tokens - self._round_started.tokens

    def steps_since_base(self, fragment: int) -> int:
        return self.now.steps - self._bases[fragment].steps

    def contribute(self, fragment: int) -> LocalWork:
        """The work since the fragment's base. Tokens that were not counted before are counted with
        it, unless :meth:`take_back` says that it was missed. Steps of which the caller counted no
        tokens weigh as one token: a contribution of none is not waited for, nor is its round ever
        committed."""
        base, now = self._bases[fragment], self.now
        first = base.steps - self._losses_from
        losses = torch.stack([loss.float().reshape(()) for loss in list(self._losses)[first:]])
        new_tokens, self._uncounted_tokens = self._uncounted_tokens, 0
        return LocalWork(
            tokens=max(now.tokens - base.tokens, min(1, now.steps - base.steps)),
            new_tokens=new_tokens,
            steps=now.steps - base.steps,
            loss=float(losses.mean()),
            compute_s=now.compute_s - base.compute_s,
        )

    def take_back(self, missed: LocalWork) -> None:
        """A contribution was not taken, and its work lives on: count its tokens with the next."""
        self._uncounted_tokens += missed.new_tokens

    def throw_away(self) -> None:
        """Nothing of the work since any base will ever be contributed."""
        self._uncounted_tokens = 0
        self.move_base(None, self.now)

    def move_base(self, fragment: int | None, to: Mark) -> None:
        """The work up to ``to`` is in the global weights, or dropped; None: of all fragments."""
        chosen = range(len(self._bases)) if fragment is None else [fragment]
        for index in chosen:
            self._bases[index] = to
        oldest = min(base.steps for base in self._bases)
        while self._losses_from < oldest:
            self._losses.popleft()
            self._losses_from += 1
