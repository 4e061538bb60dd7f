"""Whatever a run's prefix holds: the run's tick ends after bounded work, a forced stop cancels its
jobs, every page and export of it answers, and other runs go on.

``ARCHIPELAGO_ADVERSARIAL_EXAMPLES=26 ARCHIPELAGO_ADVERSARIAL_RECORDS=400`` tries ten thousand
records, others each time.
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

pytestmark = pytest.mark.django_db

STATEMENTS = 100 * max(RECORDS, 40)
"""Of one tick, far above what it needs: it may not grow with what the records hold."""


@settings(settings.get_profile("adversarial"))
@given(objects=st.lists(hostile, min_size=RECORDS, max_size=RECORDS))
def test_hostile_records_break_nothing(
    make_world: Callable[..., Any], viewer: Any, objects: list[tuple[str, bytes]]
) -> None:
    with transaction.atomic():
        try_records(make_world, viewer, objects)
        transaction.set_rollback(True)


def try_records(
    make_world: Callable[..., Any], viewer: Any, objects: list[tuple[str, bytes]]
) -> None:
    other = make_world(replicas=1, total_rounds=70)
    other.start()
    world = make_world(replicas=2, total_rounds=70)
    world.start()
    keys = {world.key(number) for number in (0, 1)}
    for key, data in objects:
        world.bucket.store.put(key, data)
    for _ in range(2):
        with CaptureQueriesContext(connection) as found:
            world.tick()
        assert len(found) < STATEMENTS
    assert LogLine.objects.count() <= RECORDS * MAX_LOGS
    assert MetricBlock.objects.filter(run=world.run).count() < 100 * RECORDS
    assert Round.objects.filter(run=world.run).count() < 10 * RECORDS
    assert Event.objects.filter(run=world.run).count() < 10 * RECORDS
    assert broken(viewer, world.run) == []
    if world.run.ended_at is None:
        lifecycle.force_stop(world.run, actor=world.run.owner)
        world.tick()
        assert keys <= set(world.executor.cancelled)
    goes_on(other)


def goes_on(other: Any) -> None:
    """A run beside it commits a round and is looked at."""
    other.bucket.plan(1, (0,))
    other.bucket.commit(1, (0,))
    other.bucket.segment(0, 1, losses=(3.0, 2.0))
    other.beat_all(round=2)
    other.tick()
    assert other.run.committed_rounds == 1
    assert other.replica().step == 2
    assert not other.run.events.filter(kind="refused").exists()
