"""A run that was paused twice is imported unchanged, row by row."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import call_command

from runs.actions import lifecycle
from runs.models import MetricBlock, Run
from tests.runs.actions.test_lifecycle import drain_all_jobs, launch, pause
from tests.runs.rows import rows

pytestmark = pytest.mark.django_db


@pytest.mark.slow
def test_pauses_do_not_count_towards_the_round_time_after_an_import(
    make_harness: Callable[..., Any],
) -> None:
    harness = make_harness(replicas=2)
    harness.bucket.segment(0, 1, losses=(3.0,))
    harness.start()
    for n in range(3):
        for round in (2 * n + 1, 2 * n + 2):
            harness.clock.pass_s(10)
            harness.bucket.commit(round, (0, 1), wall_s=harness.clock().timestamp())
        for number in (0, 1):
            harness.bucket.beat(number, 1, "computing", seq=n + 1)
        harness.tick()
        pause(harness)
        drain_all_jobs(harness, seq=n + 1)
        assert harness.run.state == "paused"
        if n < 2:
            harness.clock.pass_s(7200)
            lifecycle.unpause(harness.run, actor=harness.run.owner)
            launch(harness)
            harness.clock.pass_s(5)
    assert harness.run.round_s == pytest.approx(10, abs=1)
    assert MetricBlock.objects.get(series="tokens_per_s", level=0, replica=None).count == 3
    before = rows(harness.run)
    Run.objects.all().delete()
    call_command("import_run", harness.run.rendezvous, stdout=io.StringIO())
    after = rows(Run.objects.get())
    for name, result in before.items():
        assert after[name] == result, name
