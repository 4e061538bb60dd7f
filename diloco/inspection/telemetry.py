"""The end of the replicas' telemetry: reports of rounds, evaluations.

Segments are numbered without gaps and their rounds never fall, so they are read backwards, a batch
at a time, until they are of rounds before those that are shown. A long run's segments are many:
at most :data:`MOST` of each incarnation are read, and the picture says where there were more.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.inspection.picture import LeaseSeen, Reported
from diloco.inspection.reader import Reader, last_that
from diloco.protocol import keys
from diloco.protocol.records import Identity
from diloco.protocol.telemetry import Evaluation, Segment

BATCH = 8
MOST = 256


@dataclass(frozen=True, kw_only=True)
class Told:
    reports: tuple[Reported, ...]
    evaluations: tuple[Evaluation, ...]
    truncated: tuple[int, ...]


@dataclass
class _Tail:
    """What is left to read of one incarnation: segments up to ``end``."""

    identity: Identity
    end: int
    read: int = 0

    def take(self) -> list[str]:
        numbers = range(max(1, self.end - BATCH + 1), self.end + 1)
        self.end -= len(numbers)
        self.read += len(numbers)
        return [
            keys.telemetry(self.identity.replica, self.identity.incarnation, n) for n in numbers
        ]


def read(reader: Reader, leases: tuple[LeaseSeen, ...], *, first: int) -> Told:
    """What has been told of rounds from ``first`` on, by round and replica."""
    ends = reader.pool.map(lambda lease: _newest(reader, lease.identity), leases)
    tails = [_Tail(lease.identity, end) for lease, end in zip(leases, ends, strict=True)]
    reports: list[Reported] = []
    evaluations: set[Evaluation] = set()
    truncated: set[int] = set()
    while tails := [tail for tail in tails if tail.end > 0]:
        wanted = [(tail, key) for tail in tails for key in tail.take()]
        segments = reader.read_all((key for _, key in wanted), Segment)
        for (tail, _), segment in zip(wanted, segments, strict=True):
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
    return Told(
        reports=tuple(sorted(reports, key=lambda r: (r.report.round, r.identity))),
        evaluations=tuple(sorted(evaluations, key=lambda e: e.round)),
        truncated=tuple(sorted(truncated)),
    )


def _newest(reader: Reader, identity: Identity) -> int:
    def exists(n: int) -> bool:
        return reader.exists(keys.telemetry(identity.replica, identity.incarnation, n))

    return last_that(exists, hint=1)
