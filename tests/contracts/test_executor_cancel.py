"""Cancellation: one call is enough, and a failed request needs one repeated call."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from executors.base import JobState, RetryLater
from tests.emulators.interruptions import Interruption
from tests.executors.harnesses import Harness, end_of, every_harness, launch, number_in

pytestmark = pytest.mark.processes

REQUESTS = 4
"""An upper bound of the requests that ``cancel`` sends for one job."""


@every_harness()
def test_one_call_is_enough(harness: Harness, tmp_path: Path) -> None:
    handles = [
        launch(harness.executor(), "wait", tmp_path / key, key=key)
        for key in ("run-0-1", "run-1-1")
    ]
    for handle in handles:
        number_in(tmp_path / handle.launch_key)
    harness.executor().cancel(handles)
    for handle in handles:
        assert end_of(harness.executor(), handle).state is JobState.ENDED


@every_harness("interrupt")
@pytest.mark.parametrize("how", [Interruption.REFUSED, Interruption.KILLED_BEFORE])
def test_failed_request_needs_one_more_call(
    harness: Harness, tmp_path: Path, how: Interruption
) -> None:
    handles = [
        launch(harness.executor(), "wait", tmp_path / str(n), key=f"run-{n}-1")
        for n in range(REQUESTS)
    ]
    for at, handle in enumerate(handles):
        number_in(tmp_path / str(at))
        executor = harness.executor()
        harness.interrupt(at, how)
        with contextlib.suppress(RetryLater):
            executor.cancel([handle])
        harness.restore()
        executor.cancel([handle])
    for handle in handles:
        assert end_of(harness.executor(), handle).state is JobState.ENDED
