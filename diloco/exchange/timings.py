"""Durations of the phases of one round's exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco.clock import Clock


@dataclass
class Timings:
    """Seconds of each phase of one exchange, by name of :data:`diloco.protocol.telemetry.PHASES`.

    Used by one thread at a time, but for :meth:`measure_rest`.
    """

    clock: Clock
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, phase: str, seconds: float) -> None:
        """Add ``seconds``, which can be negative, to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @contextlib.contextmanager
    def measure(self, phase: str, *, excluding: str = "") -> Iterator[None]:
        """Add the duration of the block to ``phase``, without that of the phase ``excluding``
        which is measured inside it."""
        start_s, excluded_s = self.clock.monotonic(), self.seconds.get(excluding, 0.0)
        try:
            yield
        finally:
            self.add(phase, self.clock.monotonic() - start_s)
            self.add(phase, excluded_s - self.seconds.get(excluding, 0.0))

    @contextlib.contextmanager
    def measure_rest(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to ``phase``, without what another thread measures
        meanwhile."""
        start_s, before_s = self.clock.monotonic(), sum(self.seconds.values())
        try:
            yield
        finally:
            measured_s = sum(self.seconds.values()) - before_s
            self.add(phase, max(0.0, self.clock.monotonic() - start_s - measured_s))
