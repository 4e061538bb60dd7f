"""Seconds of transfers with the adaptive limit of parts in flight, beside the best fixed number.

The lines are simulated, under virtual time: a latency before each part, a rate per connection, and
one for all of them that the connections share. ``--variation`` is that of both from part to part.
*Uploads* are objects of the same known size, one after the other; *readers* read at the same time,
again and again. The ratio is the seconds of all of them, also of those in which the limit adapts,
over those with the fixed number that is the fastest on that line for that size. Below 1 a limit
that changes is faster than any fixed one.

Usage: python bench/parts_in_flight.py [--times 250] [--errors 0 1] [--variation 0 0.2]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.support.line import MB, LineSpec
from diloco.store.base import PART_BYTES
from diloco.store.transfers import BACK_OFF_S, PARTS_IN_FLIGHT, Flight, Line
from tests.diloco.clocks import ManualClock

LINES = {
    "never full": LineSpec(latency_s=0.06, connection=90 * MB, total=10_000 * MB),
    "full at 20": LineSpec(latency_s=0.06, connection=90 * MB, total=1400 * MB),
    "full at 10": LineSpec(latency_s=0.06, connection=90 * MB, total=700 * MB),
    "full at 3": LineSpec(latency_s=0.03, connection=50 * MB, total=110 * MB),
    "full at 1": LineSpec(latency_s=0.01, connection=900 * MB, total=100 * MB),
    "far away": LineSpec(latency_s=0.3, connection=20 * MB, total=150 * MB),
}
SIZES = range(2, 61)
READERS = (
    (2,) * 4,
    (3,) * 3,
    (4,) * 4,
    (6,) * 4,
    (8, 8),
    (12, 12),
    (24, 24),
    (40, 4),
    (30, 3, 3, 3),
)
FIXED_TIMES = 10
"""Transfers with each fixed number of parts in flight."""
PAUSE_S = 100.0
"""Between two transfers, as between rounds."""


@dataclass
class Part:
    """A part in transfer: it waits, and then has ``left_bytes``, at most at the rate ``most``."""

    wait_s: float
    left_bytes: float
    most: float
    ended: Callable[[], None]


class Connections:
    """The parts in transfer on one line."""

    def __init__(self, spec: LineSpec, variation: float) -> None:
        self.clock = ManualClock()
        self._spec = spec
        self._rng = random.Random(0)
        self._variation = variation
        self._parts: list[Part] = []

    def begin(self, ended: Callable[[], None]) -> None:
        """Begin a part; call ``ended`` at its end."""
        wait_s, most = self._spec.latency_s * self._factor(), self._spec.connection * self._factor()
        self._parts.append(Part(wait_s, float(PART_BYTES), most, ended))

    def _factor(self) -> float:
        return self._rng.uniform(1 - self._variation, 1 + self._variation)

    def run(self) -> None:
        """Move all parts, with those that begin meanwhile."""
        while self._parts:
            rates = self._rates()
            step_s = min(part.wait_s or part.left_bytes / rates[id(part)] for part in self._parts)
            self.clock.sleep(step_s)
            for part in self._parts:
                if part.wait_s:
                    part.wait_s = max(0.0, part.wait_s - step_s)
                else:
                    part.left_bytes -= rates[id(part)] * step_s
            over = [part for part in self._parts if part.left_bytes <= 1.0]
            self._parts = [part for part in self._parts if part.left_bytes > 1.0]
            for part in over:
                part.ended()

    def _rates(self) -> dict[int, float]:
        """Return the fair rate of each part that does not wait, by its id: equal, but none above
        its largest."""
        moving = sorted((part for part in self._parts if not part.wait_s), key=lambda p: p.most)
        left, rates = self._spec.total, {}
        for count, part in zip(range(len(moving), 0, -1), moving, strict=True):
            rates[id(part)] = rate = min(part.most, left / count)
            left -= rate
        return rates


# -- uploads ---------------------------------------------------------------------------------------


def move(connections: Connections, parts: int, in_flight: int) -> None:
    """Move ``parts``, at most ``in_flight`` at a time."""
    left = parts

    def begin() -> None:
        nonlocal left
        if left:
            left -= 1
            connections.begin(begin)

    for _ in range(in_flight):
        begin()
    connections.run()


def upload(connections: Connections, line: Line, parts: int) -> None:
    with line.measured(parts) as stream:
        stream.parts, stream.size_bytes = parts, parts * PART_BYTES
        move(connections, parts, stream.limit)


# -- readers ---------------------------------------------------------------------------------------


class Parts(Protocol):
    """What a reader uses of :class:`diloco.store.transfers.Line`."""

    def begin(
        self, size_bytes: int, *, alone: bool, held: int, left: int, retry: Callable[[], bool]
    ) -> Flight | None: ...
    def end(self, flight: Flight, *, complete: bool) -> None: ...
    def release(self, size_bytes: int) -> None: ...
    def offer_room(self) -> None: ...
    def forget(self, retry: Callable[[], bool]) -> None: ...


class FixedLimit:
    """A line on which ``limit`` parts are in flight."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_flight = 0
        self._refused: dict[Callable[[], bool], None] = {}

    def begin(
        self, size_bytes: int, *, alone: bool, held: int, left: int, retry: Callable[[], bool]
    ) -> Flight | None:
        if self._in_flight >= self._limit and not alone:
            self._refused[retry] = None
            return None
        self._in_flight += 1
        return Flight(size_bytes, 0.0, 0.0, 0)

    def end(self, flight: Flight, *, complete: bool) -> None:
        self._in_flight -= 1

    def release(self, size_bytes: int) -> None: ...

    def offer_room(self) -> None:
        refused, self._refused = self._refused, {}
        for retry in refused:
            retry()

    def forget(self, retry: Callable[[], bool]) -> None:
        self._refused.pop(retry, None)


class Reader:
    """Reads ``parts``, and takes each at once."""

    def __init__(self, connections: Connections, line: Parts, parts: int) -> None:
        self._connections = connections
        self._line = line
        self._left = parts
        self._held = 0

    def begin(self) -> bool:
        """Begin as many parts as the line allows."""
        while self._left:
            flight = self._line.begin(
                PART_BYTES,
                alone=self._held == 0,
                held=self._held,
                left=self._left,
                retry=self.begin,
            )
            if flight is None:
                break
            self._left -= 1
            self._held += 1
            self._connections.begin(lambda flight=flight: self._end(flight))
        return False

    def _end(self, flight: Flight) -> None:
        self._line.end(flight, complete=True)
        self._held -= 1
        self._line.release(PART_BYTES)
        self.begin()
        if not self._left:
            self._line.forget(self.begin)
        self._line.offer_room()


def read(connections: Connections, line: Parts, each: Sequence[int]) -> None:
    readers = [Reader(connections, line, parts) for parts in each]
    for reader in readers:
        reader.begin()
    connections.run()


# -- ratios ----------------------------------------------------------------------------------------


def seconds(connections: Connections, times: int, transfer: Callable[[], None]) -> float:
    """Return the mean seconds of ``transfer``."""
    spent_s = 0.0
    for _ in range(times):
        begun_s = connections.clock.monotonic()
        transfer()
        spent_s += connections.clock.monotonic() - begun_s
        connections.clock.sleep(PAUSE_S)
    return spent_s / times


def ratio(
    spec: LineSpec,
    variation: float,
    times: int,
    errors: int,
    adaptive: Callable[[Connections, Line], None],
    fixed: Callable[[Connections, int], None],
) -> float:
    """Return the seconds of ``adaptive`` over those of the fastest ``fixed``. The limit begins with
    ``errors`` of the store."""
    connections = Connections(spec, variation)
    line = Line(clock=connections.clock)
    for _ in range(errors):
        line.back_off()
        connections.clock.sleep(2 * BACK_OFF_S)
    spent_s = seconds(connections, times, lambda: adaptive(connections, line))
    rounds = FIXED_TIMES if variation else 1
    best_s = math.inf
    for limit in range(1, PARTS_IN_FLIGHT + 1):
        alone = Connections(spec, variation)
        best_s = min(best_s, seconds(alone, rounds, lambda: fixed(alone, limit)))  # noqa: B023
    return spent_s / best_s


def upload_ratios(spec: LineSpec, variation: float, times: int, errors: int) -> dict[object, float]:
    return {
        parts: ratio(
            spec,
            variation,
            times,
            errors,
            lambda connections, line, parts=parts: upload(connections, line, parts),
            lambda connections, limit, parts=parts: move(connections, parts, limit),
        )
        for parts in SIZES
    }


def reader_ratios(spec: LineSpec, variation: float, times: int, errors: int) -> dict[object, float]:
    return {
        each: ratio(
            spec,
            variation,
            times,
            errors,
            lambda connections, line, each=each: read(connections, line, each),
            lambda connections, limit, each=each: read(connections, FixedLimit(limit), each),
        )
        for each in READERS
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--times", type=int, default=250, help="transfers of each size")
    parser.add_argument("--errors", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--variation", type=float, nargs="+", default=[0.0, 0.2])
    given = parser.parse_args()
    head = ("line", "errors", "variation", "uploads: mean", "worst", "readers: mean", "worst")
    print(f"| {' | '.join(head)} |\n| {' | '.join(['---'] * len(head))} |", flush=True)
    for name, spec in LINES.items():
        for errors in given.errors:
            for variation in given.variation:
                cells = [name, str(errors), f"{variation:g}"]
                for ratios in (upload_ratios, reader_ratios):
                    found = ratios(spec, variation, given.times, errors)
                    worst = max(found, key=lambda one: found[one])
                    mean = statistics.mean(found.values())
                    cells += [f"{mean:.2f}", f"{found[worst]:.2f} ({worst})"]
                print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
