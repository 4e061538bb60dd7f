"""Counts a replica's inner steps, tokens and compute time.

Counts are cumulative since the start of the process. A :class:`StepMark` is the counts at one
moment, and a contribution stands for the work *since* a mark. Each fragment has the mark of its
base, which stays in place when a round was missed or void.
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
    """The work of a replica since its base.

    ``loss`` is the mean over its steps. ``new_tokens`` are those not counted by an earlier
    contribution. ``rounds`` are the rounds of work: one for each contribution since the base.
    """

    tokens: int
    new_tokens: int
    steps: int
    rounds: int
    loss: float
    compute_s: float


@dataclass(frozen=True, order=True)
class StepMark:
    """Cumulative counts at one moment."""

    steps: int = 0
    tokens: int = 0
    compute_s: float = 0.0


class StepCounter:
    """Counts inner steps. Losses stay tensors (perhaps on a GPU) until they are needed."""

    def __init__(self, clock: Clock, *, fragments: int = 1) -> None:
        self._clock = clock
        self.now = StepMark()
        self.steps_in_round = 0
        self.step_s = 0.0
        """Mean seconds of a step of the last round with steps."""
        self.round_started_wall_s = 0.0
        self._bases = [StepMark()] * fragments
        self._rounds = [0] * fragments  # rounds of work since the base of each fragment
        self._uncounted_tokens = 0
        self._step_started_s = 0.0
        self.round_began = StepMark()
        self._losses: deque[Tensor] = deque()
        self._losses_from = 0  # steps before the first kept loss

    def begin_round(self, *, made: int = 0) -> None:
        """Start a round, of which an earlier process has already contributed ``made`` steps."""
        if steps := self.now.steps - self.round_began.steps:
            self.step_s = self.compute_in_round_s / steps
        self.steps_in_round = made
        self.round_began = self.now
        self.round_started_wall_s = self._clock.wall()
        self.resume()

    def resume(self) -> None:
        """Start the clock of the next inner step; the time before is not compute."""
        self._step_started_s = self._clock.monotonic()

    def count(self, *, tokens: int, loss: Number) -> float:
        """Count one step that has just ended, and return its duration in seconds.

        Raises :class:`ValueError` for a negative number of tokens, and for a loss that is not a
        scalar.
        """
        if tokens < 0:
            raise ValueError(f"tokens: expected 0 or more, found {tokens}")
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(
                f"loss: expected a scalar, the step's mean loss, found a tensor of shape "
                f"{tuple(loss.shape)}; pass loss.mean()"
            )
        now_s = self._clock.monotonic()
        step_s, self._step_started_s = now_s - self._step_started_s, now_s
        self.now = StepMark(
            self.now.steps + 1, self.now.tokens + tokens, self.now.compute_s + step_s
        )
        self.steps_in_round += 1
        self._uncounted_tokens += tokens
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss))
        return step_s

    def count_more(self, tokens: int) -> None:
        """Add tokens that other ranks of the replica processed in the step counted last."""
        self.now = replace(self.now, tokens=self.now.tokens + tokens)
        self._uncounted_tokens += tokens

    @property
    def compute_in_round_s(self) -> float:
        """Compute time of the current round in seconds."""
        return self.now.compute_s - self.round_began.compute_s

    @property
    def tokens_in_round(self) -> int:
        return self.now.tokens - self.round_began.tokens

    def steps_since_base(self, fragment: int) -> int:
        """Return the inner steps since the base of ``fragment``."""
        return self.now.steps - self._bases[fragment].steps

    def rounds_since_base(self, fragment: int) -> int:
        """Return the contributions since the base of ``fragment``."""
        return self._rounds[fragment]

    def contribute(self, fragment: int) -> LocalWork:
        """Return the work since the fragment's base, and count a round of it.

        Tokens not counted yet are counted with it, unless :meth:`take_back` returns them. Steps
        without tokens weigh as one token, because a contribution without tokens is never included.
        """
        base, now = self._bases[fragment], self.now
        first = base.steps - self._losses_from
        losses = torch.stack([loss.float().reshape(()) for loss in list(self._losses)[first:]])
        new_tokens, self._uncounted_tokens = self._uncounted_tokens, 0
        self._rounds[fragment] += 1
        return LocalWork(
            tokens=max(now.tokens - base.tokens, min(1, now.steps - base.steps)),
            new_tokens=new_tokens,
            steps=now.steps - base.steps,
            rounds=self._rounds[fragment],
            loss=float(losses.mean()),
            compute_s=now.compute_s - base.compute_s,
        )

    def take_back(self, missed: LocalWork) -> None:
        """Return the tokens of a contribution that was not included but whose progress is kept: the
        next one counts them."""
        self._uncounted_tokens += missed.new_tokens

    def throw_away(self) -> None:
        """Discard the work since all bases: it is never contributed."""
        self._uncounted_tokens = 0
        self.move_base(None, self.now)

    def move_base(self, fragment: int | None, to: StepMark) -> None:
        """Move the base of ``fragment`` (None: of all fragments) to the mark ``to``: the work
        before it is in the global weights or discarded."""
        chosen = range(len(self._bases)) if fragment is None else [fragment]
        for index in chosen:
            self._bases[index] = to
            self._rounds[index] = 0
        oldest = min(base.steps for base in self._bases)
        while self._losses_from < oldest:
            self._losses.popleft()
            self._losses_from += 1
