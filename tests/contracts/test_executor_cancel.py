"""A request to end a job: accepted by the first call, and one failed request costs one call."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from executors.base import JobState, RetryLater
from tests.emulators.interruptions import Interruption
from tests.executors.worlds import World, end_of, every_world, launch, number_in

pytestmark = pytest.mark.processes

REQUESTS = 4
"""At least as many as the ``cancel`` of any backend sends for one job."""


@every_world()
def test_one_call_is_enough(world: World, tmp_path: Path) -> None:
    handles = [
        launch(world.executor(), "wait", tmp_path / key, key=key) for key in ("run-0-1", "run-1-1")
    ]
    for handle in handles:
        number_in(tmp_path / handle.launch_key)
    world.executor().cancel(handles)
    for handle in handles:
        assert end_of(world.executor(), handle).state is JobState.ENDED


@every_world("interrupt")
@pytest.mark.parametrize("how", [Interruption.REFUSED, Interruption.KILLED_BEFORE])
def test_one_dead_request_costs_one_call(world: World, tmp_path: Path, how: Interruption) -> None:
    handles = [
        launch(world.executor(), "wait", tmp_path / str(n), key=f"run-{n}-1")
        for n in range(REQUESTS)
    ]
    for at, handle in enumerate(handles):
        number_in(tmp_path / str(at))
        executor = world.executor()
        world.interrupt(at, how)
        with contextlib.suppress(RetryLater):
            executor.cancel([handle])
        world.restore()
        executor.cancel([handle])
    for handle in handles:
        assert end_of(world.executor(), handle).state is JobState.ENDED
