"""The records of work units in the rendezvous: who has trained which samples of an epoch.

::

    units/plan.json                      create-once: the division of an epoch, the same for all
    units/<epoch>/<unit>/<seq>.json      create-once: the links of a unit's chain, seq = 0, 1, ...
    units/held/<replica>.<incarnation>.json   the units that a process holds; its only writer

A *unit* is a range of samples of an epoch's order. Its chain is a log: each link is created once,
so of two processes that add to it one has to read what the other wrote. A *claim* makes its writer
the holder of the unit. Before the holder contributes to a round, it adds a *contribution*: the
round, and the samples of the unit whose steps the contribution contains; of several by one process
for one round the last one counts. These samples are
**seen** if, and only if, the commit of that round includes this process. Everything else of the
unit is open, and its next holder trains it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diloco.protocol.records import Identity, Record

CLAIM, CONTRIBUTION = "claim", "contribution"
LINKS = 10_000
"""Most links of a chain; a unit of one round has two."""
EPOCHS = 1_000_000
LAST_UNIT = 99_999
"""The largest number of a unit; an epoch of more samples has larger units."""

Ranges = tuple[tuple[int, int], ...]
"""Samples from a start up to, but not including, an end; disjoint and sorted."""


@dataclass(frozen=True, kw_only=True)
class UnitPlan(Record):
    """How all epochs are divided. ``shards`` is the digest of the index; unit u has the samples
    from ``u * unit_samples`` on. Replicas claim from ``stripes`` sequences first."""

    shards: str
    context: int
    seed: int
    samples: int
    unit_samples: int
    stripes: int

    @property
    def units(self) -> int:
        return -(-self.samples // self.unit_samples)

    def size_of(self, unit: int) -> int:
        """Return the number of samples of a unit."""
        return min(self.unit_samples, self.samples - unit * self.unit_samples)


@dataclass(frozen=True, kw_only=True)
class UnitLink(Record):
    """One link. ``kind`` is claim or contribution; ``starts`` and ``ends`` are the sample ranges of
    a contribution to ``round``, relative to the unit."""

    epoch: int
    unit: int
    seq: int
    kind: str
    writer: Identity
    round: int = 0
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def ranges(self) -> Ranges:
        return tuple(zip(self.starts, self.ends, strict=False))


@dataclass(frozen=True, kw_only=True)
class HeldUnits(Record):
    """The units whose samples a process has claimed and that are not all seen. Written before each
    claim, so it has every unit that the process can hold."""

    writer: Identity
    epochs: tuple[int, ...]
    units: tuple[int, ...]


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of ranges."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return tuple(out)


def without(size: int, seen: Iterable[tuple[int, int]]) -> Ranges:
    """Return the ranges of 0 to ``size`` that are not in ``seen``."""
    out, at = [], 0
    for start, end in merged(seen):
        if at < start:
            out.append((at, min(start, size)))
        at = max(at, end)
    return tuple(out) if at >= size else (*out, (at, size))
