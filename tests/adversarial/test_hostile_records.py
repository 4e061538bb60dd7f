"""With hostile records in a run's prefix, its ticks do bounded work, a forced stop cancels its
jobs, all its pages and exports respond, and other runs continue.

``ARCHIPELAGO_ADVERSARIAL_EXAMPLES=26 ARCHIPELAGO_ADVERSARIAL_RECORDS=400`` tries ten thousand
random records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.protocol.telemetry import MAX_LOGS
from runs.actions import lifecycle
from runs.models import Event, LogLine, MetricBlock, Round
from tests.adversarial.addresses import broken
from tests.adversarial.records import RECORDS, hostile

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

STATEMENTS = 100 * max(RECORDS, 40)
"""Limit of one tick, far above its need: the content of records must not increase the number."""


@settings(settings.get_profile("adversarial"))
@given(objects=st.lists(hostile, min_size=RECORDS, max_size=RECORDS))
def test_hostile_records_break_nothing(
    make_harness: Callable[..., Any], viewer: Any, objects: list[tuple[str, bytes]]
) -> None:
    with transaction.atomic():
        try_records(make_harness, viewer, objects)
        transaction.set_rollback(True)


def try_records(
    make_harness: Callable[..., Any], viewer: Any, objects: list[tuple[str, bytes]]
) -> None:
    other = make_harness(replicas=1, total_rounds=70)
    other.start()
    harness = make_harness(replicas=2, total_rounds=70)
    harness.start()
    keys = {harness.key(number) for number in (0, 1)}
    for key, data in objects:
        harness.bucket.store.put(key, data)
    for _ in range(2):
        with CaptureQueriesContext(connection) as result:
            harness.tick()
        assert len(result) < STATEMENTS
    assert LogLine.objects.count() <= RECORDS * MAX_LOGS
    assert MetricBlock.objects.filter(run=harness.run).count() < 100 * RECORDS
    assert Round.objects.filter(run=harness.run).count() < 10 * RECORDS
    assert Event.objects.filter(run=harness.run).count() < 10 * RECORDS
    assert broken(viewer, harness.run) == []
    if harness.run.ended_at is None:
        lifecycle.force_stop(harness.run, actor=harness.run.owner)
        harness.tick()
        assert keys <= set(harness.executor.cancelled)
    check_other_run(other)


def check_other_run(other: Any) -> None:
    """Check that another run still commits a round."""
    other.bucket.plan(1, (0,))
    other.bucket.commit(1, (0,))
    other.bucket.segment(0, 1, losses=(3.0, 2.0))
    other.beat_all(round=2)
    other.tick()
    assert other.run.committed_rounds == 1
    assert other.replica().step == 2
    assert not other.run.events.filter(kind="refused").exists()
