"""What a replica has done since its base: the books of the inner loop.

Two spans are kept apart. Work *since the base* goes into the next contribution and survives a round
that was missed or void; steps and compute *in this round* start again with every round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.exchange import LocalWork
from diloco.rendezvous.clock import Clock
from diloco.reporter import Number


class Work:
    """Counts inner steps. Losses are kept as they are (perhaps on a GPU) until they are needed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.round_started_wall_s = 0.0
        self.steps_in_round = 0
        self._step_started_s = 0.0
        self._compute_in_round_s = 0.0
        self.reset()

    def reset(self) -> None:
        """The base has moved and holds this work (or the work is thrown away)."""
        self.tokens = 0
        self.steps = 0
        self._compute_s = 0.0
        self._losses: list[Tensor] = []

    def begin_round(self) -> None:
        self.steps_in_round = 0
        self._compute_in_round_s = 0.0
        self.round_started_wall_s = self._clock.wall()
        self._step_started_s = self._clock.monotonic()

    def count(self, *, tokens: int, loss: Number) -> float:
        """Count one step that has just ended; returns its duration in seconds."""
        now_s = self._clock.monotonic()
        step_s, self._step_started_s = now_s - self._step_started_s, now_s
        self.tokens += tokens
        self.steps += 1
        self.steps_in_round += 1
        self._compute_s += step_s
        self._compute_in_round_s += step_s
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss))
        return step_s

    @property
    def compute_in_round_s(self) -> float:
        return self._compute_in_round_s

    def since_base(self) -> LocalWork:
        losses = torch.stack([loss.float().reshape(()) for loss in self._losses])
        return LocalWork(
            tokens=self.tokens,
            steps=self.steps,
            loss=float(losses.mean()),
            compute_s=self._compute_s,
        )
