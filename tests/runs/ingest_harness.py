"""Runs only the part of a tick that reads telemetry."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tests.runs.run_harness import Bucket, Clock, incarnation

if TYPE_CHECKING:
    from runs.ingest.segment_store import Batch
    from runs.metrics.changes import Changes
    from runs.models import TelemetryCursor


class IngestHarness:
    """Ingests only the telemetry of one run."""

    def __init__(self, run: Any, clock: Clock) -> None:
        from runs.ingest.stores import store_for

        self.run, self.clock = run, clock
        self.bucket = Bucket(store_for(run), wall_s=clock().timestamp())
        self.seen: list[tuple[int, str]] = [(0, incarnation(0)), (1, incarnation(1))]
        self.ended: frozenset[int] = frozenset()

    def ingest(self) -> Changes:
        from runs.ingest.telemetry import ingest_telemetry
        from runs.metrics.changes import Changes

        self.run.refresh_from_db()
        changes = Changes()
        ingest_telemetry(
            self.run,
            self.bucket.store,
            list(self.run.replicas.all()),
            self.seen,
            ended=self.ended,
            now=self.clock(),
            changes=changes,
        )
        self.run.refresh_from_db()
        return changes

    def cursor(self, replica: int = 0, seq: int = 1) -> TelemetryCursor:
        from runs.models import TelemetryCursor

        return TelemetryCursor.objects.get(
            replica__run=self.run, incarnation=incarnation(replica, seq)
        )

    def read_batch(self, cursor: TelemetryCursor) -> Batch:
        """The new segments of one incarnation, parsed and not stored."""
        from diloco.store.base import MissingKey
        from runs.ingest.limits import RunBounds
        from runs.ingest.segment_store import Batch, segment_key
        from runs.ingest.telemetry import parse_segment

        bounds, segments, n = RunBounds.of(self.run), [], cursor.next_n
        with contextlib.suppress(MissingKey):
            while True:
                data = self.bucket.store.get(segment_key(cursor, n))
                number, name = cursor.replica.number, cursor.incarnation
                segments.append((n, parse_segment(data, number, name, n, bounds)))
                n += 1
        return Batch(cursor=cursor, segments=tuple(segments), drained=True)

    def loss(self, replica: int = 0) -> list[float]:
        from runs.metrics import charts

        whole = charts.Window(max_points=10**9)
        curves = charts.read(self.run, [("loss", replica)], whole)
        return list(curves[0].points.value) if curves else []
