"""More failing records than the quarantine lists individually."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runs.ingest import quarantine, telemetry
from runs.ingest.quarantine import FAILURES
from runs.models import Alert, IngestState, QuarantinedRecord, TelemetryCursor
from tests.runs.run_harness import incarnation

pytestmark = pytest.mark.django_db
BAD = 12


@pytest.fixture
def harness(make_harness: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replica 0 writes segments that the code cannot process."""
    made = make_harness(replicas=2, total_rounds=70)
    made.start()
    monkeypatch.setattr(quarantine, "KEPT", 4)
    real = telemetry.parse_segment

    def parse(data: bytes, replica: int, incarnation: str, n: int, bounds: Any) -> Any:
        if replica == 0 and n <= BAD:
            raise ZeroDivisionError(f"segment {n}")
        return real(data, replica, incarnation, n, bounds)

    monkeypatch.setattr(telemetry, "parse_segment", parse)
    for n in range(1, BAD + 1):
        made.bucket.segment(0, n)
    made.bucket.segment(0, BAD + 1, losses=[5.0])
    return made


@pytest.mark.slow
def test_a_flood_of_bad_records_is_counted_and_delays_no_incarnation(harness: Any) -> None:
    for _ in range(BAD * (FAILURES + 1)):
        harness.ingest()
        harness.clock.pass_s(1.0)
    harness.tick()
    assert harness.replica(0).loss == 5.0
    cursor = TelemetryCursor.objects.get(replica__run=harness.run, incarnation=incarnation(0))
    assert cursor.next_n == BAD + 2
    rows = QuarantinedRecord.objects.filter(run=harness.run)
    assert rows.count() <= quarantine.KEPT + 1
    [summary] = rows.filter(key__endswith="*")
    assert (summary.key, summary.replica) == ("telemetry/00000/*", harness.replica(0))
    assert summary.failures + rows.count() - 1 == BAD
    assert summary.reason.startswith(f"{summary.failures} more records were quarantined")
    assert IngestState.objects.get(run=harness.run).quarantined == BAD
    assert Alert.objects.filter(run=harness.run, kind="quarantined").exists()
    assert len(harness.events("quarantined")) == quarantine.KEPT + 1, "one each, then one for all"


def test_records_that_failed_long_ago_make_room(harness: Any) -> None:
    old = harness.clock()
    for n in range(quarantine.KEPT):
        QuarantinedRecord.objects.create(
            run=harness.run, key=f"rounds/{n}", failures=1, first_at=old, last_at=old
        )
    for _ in range(2):
        harness.ingest()
    assert not QuarantinedRecord.objects.filter(run=harness.run, key__startswith="tele").exists()
    harness.clock.pass_s(quarantine.FORGOTTEN_AFTER.total_seconds() + 1)
    harness.ingest()
    assert QuarantinedRecord.objects.filter(run=harness.run, key__startswith="tele").exists()
