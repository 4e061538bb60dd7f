"""Bad input is reported on the run, in its events and in the replica's log."""

from __future__ import annotations

import pytest

from tests.e2e.lives import create, wait_for_failure
from tests.stack import LiveStack

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=1)]


def test_a_replica_that_cannot_start_fails_the_run_with_its_error(live_stack: LiveStack) -> None:
    """The data existed at submission and is missing when the replicas start."""
    run = create(live_stack, "no data", data="file:///nowhere/at/all")
    seen = wait_for_failure(live_stack, run)
    assert "expected" in seen["reason"] and "file:///nowhere/at/all" in seen["reason"]
    assert seen["restarts"] == [0, 0], "a restart cannot fix it"
    assert {a["exit_code"] for a in seen["attempts"]} == {78}
    errors = [event for event in seen["events"] if event["level"] == "error"]
    assert any("file:///nowhere/at/all" in event["message"] for event in errors)
    assert {event["replica__number"] for event in errors} >= {0, 1}
    (log, *_) = (live_stack.var / "jobs").glob(f"{run.replace('-', '')[:12]}-0-1/log")
    assert "file:///nowhere/at/all" in log.read_text()


def test_a_rendezvous_of_another_run_is_refused(live_stack: LiveStack) -> None:
    taken = live_stack.var / "rendezvous" / "taken"
    taken.mkdir(parents=True)
    (taken / "group.json").write_text("{}")
    run = create(live_stack, "taken", rendezvous=str(taken))
    seen = wait_for_failure(live_stack, run)
    assert "expected no group.json or this run's, found one that is not" in seen["reason"]
    assert seen["attempts"] == []
    assert (taken / "group.json").read_text() == "{}"
