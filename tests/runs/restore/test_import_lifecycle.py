"""A run that stood still twice is imported as it was, row by row."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import call_command

from runs.actions import lifecycle
from runs.models import MetricBlock, Run
from tests.runs.actions.test_lifecycle import all_leave, launch, pause
from tests.runs.rows import rows

pytestmark = pytest.mark.django_db


def test_pauses_are_no_part_of_the_pace_after_an_import(make_world: Callable[..., Any]) -> None:
    world = make_world(replicas=2)
    world.bucket.segment(0, 1, losses=(3.0,))
    world.start()
    for n in range(3):
        for round in (2 * n + 1, 2 * n + 2):
            world.clock.pass_s(10)
            world.bucket.commit(round, (0, 1), wall_s=world.clock().timestamp())
        for number in (0, 1):
            world.bucket.beat(number, 1, "computing", seq=n + 1)
        world.tick()
        pause(world)
        all_leave(world, seq=n + 1)
        assert world.run.state == "paused"
        if n < 2:
            world.clock.pass_s(7200)
            lifecycle.unpause(world.run, actor=world.run.owner)
            launch(world)
            world.clock.pass_s(5)
    assert world.run.round_s == pytest.approx(10, abs=1)
    assert MetricBlock.objects.get(series="tokens_per_s", level=0, replica=None).count == 3
    before = rows(world.run)
    Run.objects.all().delete()
    call_command("import_run", world.run.rendezvous, stdout=io.StringIO())
    after = rows(Run.objects.get())
    for name, found in before.items():
        assert after[name] == found, name
