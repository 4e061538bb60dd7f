"""The run that the tests of a module share is the same for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from executors.base import Cause, JobState

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=2)


@pytest.mark.parametrize("attempt", ["first", "second"])
def test_a_test_changes_only_its_copy(
    attempt: str, started: Any, copy_harness: Callable[..., Any]
) -> None:
    harness = copy_harness(started)
    assert harness.run.state == "running"
    assert harness.executor.launches == len(harness.executor.jobs) == 2
    assert harness.events("lost") == []
    assert not harness.bucket.store.list("final/")
    before = harness.clock()
    harness.bucket.final(1)
    harness.executor.end(harness.key(0), Cause.LOST)
    harness.tick(60)
    harness.executor.launches = 0
    assert harness.run.state != "running"
    again = copy_harness(started)
    assert (again.clock(), again.executor.launches) == (before, 2)
    assert (again.run.state, again.bucket.store.list("final/")) == ("running", [])
    assert again.executor.jobs[again.key(0)].state == JobState.RUNNING
