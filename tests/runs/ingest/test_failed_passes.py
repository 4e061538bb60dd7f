"""Ingest passes that fail unexpectedly are recorded; failures of the store do not count against a
record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runs.ingest.stores import BoundedStore
from runs.models import IngestState, QuarantinedRecord
from runs.states import RunState

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=2, total_rounds=70)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


def _state(harness: Any) -> IngestState:
    return IngestState.objects.get(run=harness.run)


def _raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **more: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError(), KeyError("k"), OSError(5)])
def test_an_exception_of_the_store_does_not_count_against_the_record(
    harness: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A commit that is not there yet was quarantined, and its round stored as void."""
    with monkeypatch.context() as broken:
        for name in ("get", "get_range"):
            broken.setattr(BoundedStore, name, _raiser(error))
        for _ in range(5):
            harness.tick()
        assert _state(harness).trouble == IngestState.Trouble.FAILED
        assert type(error).__name__ in _state(harness).message
    assert not QuarantinedRecord.objects.filter(run=harness.run).exists()
    harness.bucket.commit(1, (0, 1))
    harness.tick()
    assert harness.run.committed_rounds == 1
    assert _state(harness).trouble == ""


def test_a_store_that_cannot_be_opened_is_recorded_for_any_exception(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("runs.ingest.ingest_pass.store_for", _raiser(ValueError("odd")))
        broken.setattr("runs.reconcile.bucket_writes.store_for", _raiser(ValueError("odd")))
        harness.tick()
        assert _state(harness).trouble == IngestState.Trouble.FAILED
        assert "odd" in _state(harness).message
        assert not _state(harness).reading
        for _ in range(4):
            harness.tick(20)
    assert harness.run.state == RunState.DEGRADED
    assert "odd" in harness.run.state_reason
    harness.beat_all()
    harness.tick()
    assert _state(harness).trouble == ""


def test_a_run_whose_passes_are_killed_is_not_healthy(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in a listing: there is no record to blame."""
    with monkeypatch.context() as broken:
        broken.setattr(BoundedStore, "list", _raiser(SystemExit(9)))
        for _ in range(4):
            with pytest.raises(SystemExit):
                harness.ingest()
            harness.control(30)
    assert _state(harness).trouble == IngestState.Trouble.FAILED
    assert harness.run.state == RunState.DEGRADED
    assert "progress is unknown" in harness.run.state_reason
    harness.beat_all()
    harness.tick()
    harness.tick()
    assert _state(harness).trouble == ""
    assert harness.run.state == RunState.RUNNING
