"""Reads the end of the replicas' telemetry: reports of rounds, and evaluations.

Segments are numbered without gaps and their rounds never decrease, so they are read backwards in
batches until they precede the shown rounds. At most :data:`MOST` segments per incarnation are read;
the picture lists the replicas with more.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.inspection.picture import ObservedLease, Reported
from diloco.inspection.reader import Reader, find_last
from diloco.protocol import keys
from diloco.protocol.packed_telemetry import next_segment
from diloco.protocol.records import Identity
from diloco.protocol.telemetry import Evaluation

BATCH = 8
MOST = 256


@dataclass(frozen=True, kw_only=True)
class TelemetryTail:
    """Reports and evaluations, and the replicas whose telemetry was truncated."""

    reports: tuple[Reported, ...]
    evaluations: tuple[Evaluation, ...]
    truncated: tuple[int, ...]


@dataclass
class _Tail:
    """The remaining segments of one incarnation: those up to ``end``."""

    identity: Identity
    end: int
    read: int = 0

    def take(self) -> range:
        """Return the numbers of the next batch, newest segments last."""
        numbers = range(max(1, self.end - BATCH + 1), self.end + 1)
        self.end -= len(numbers)
        self.read += len(numbers)
        return numbers


def read(reader: Reader, leases: tuple[ObservedLease, ...], *, first: int) -> TelemetryTail:
    """Return the telemetry of rounds from ``first`` on, sorted by round and replica."""
    ends = reader.pool.map(lambda lease: _newest(reader, lease.identity), leases)
    tails = [_Tail(lease.identity, end) for lease, end in zip(leases, ends, strict=True)]
    reports: list[Reported] = []
    evaluations: set[Evaluation] = set()
    truncated: set[int] = set()
    while tails := [tail for tail in tails if tail.end > 0]:
        requests = [(tail, n) for tail in tails for n in tail.take()]
        segments = reader.read_segments((tail.identity, n) for tail, n in requests)
        for (tail, _), segment in zip(requests, segments, strict=True):
            if segment is None:
                continue
            reports += [Reported(identity=tail.identity, report=r) for r in segment.rounds]
            evaluations.update(segment.evaluations)
            if segment.round < first:
                tail.end = 0
        for tail in tails:
            if tail.end > 0 and tail.read >= MOST:
                truncated.add(tail.identity.replica)
                tail.end = 0
    return TelemetryTail(
        reports=tuple(sorted(reports, key=lambda r: (r.report.round, r.identity))),
        evaluations=tuple(sorted(evaluations, key=lambda e: e.round)),
        truncated=tuple(sorted(truncated)),
    )


def _newest(reader: Reader, identity: Identity) -> int:
    replica, incarnation = identity.replica, identity.incarnation

    def exists(n: int) -> bool:
        single = keys.telemetry(replica, incarnation, n)
        return reader.exists(single) or n in reader.pack(identity, n)

    if newest := find_last(exists, hint=1):
        return newest
    # The first segments of a long run are deleted.
    first = next_segment(reader.store, replica, incarnation, 1)
    return find_last(exists, hint=first + 1) if first else 0
