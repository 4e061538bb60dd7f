"""Passes of ingest that end as no code foresaw: what is noted, and what is not held against
records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runs.ingest.stores import BoundedStore
from runs.models import IngestState, QuarantinedRecord
from runs.states import RunState

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    made = make_world(replicas=2, total_rounds=70)
    made.start()
    return made


def _state(world: Any) -> IngestState:
    return IngestState.objects.get(run=world.run)


def _raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **more: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError(), KeyError("k"), OSError(5)])
def test_what_a_store_raises_is_not_held_against_the_record(
    world: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A commit that is not there yet was quarantined, and its round stored as void."""
    with monkeypatch.context() as broken:
        for name in ("get", "get_range"):
            broken.setattr(BoundedStore, name, _raiser(error))
        for _ in range(5):
            world.tick()
        assert _state(world).trouble == IngestState.Trouble.FAILED
        assert type(error).__name__ in _state(world).message
    assert not QuarantinedRecord.objects.filter(run=world.run).exists()
    world.bucket.commit(1, (0, 1))
    world.tick()
    assert world.run.committed_rounds == 1
    assert _state(world).trouble == ""


def test_a_store_that_cannot_be_opened_is_noted_whatever_it_raises(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("runs.ingest.ingest_pass.store_for", _raiser(ValueError("odd")))
        broken.setattr("runs.reconcile.bucket_writes.store_for", _raiser(ValueError("odd")))
        world.tick()
        assert _state(world).trouble == IngestState.Trouble.FAILED
        assert "odd" in _state(world).message
        assert not _state(world).reading
        for _ in range(4):
            world.tick(20)
    assert world.run.state == RunState.DEGRADED
    assert "odd" in world.run.state_reason
    world.beat_all()
    world.tick()
    assert _state(world).trouble == ""


def test_a_run_whose_passes_are_killed_before_they_read_does_not_look_healthy(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in a listing: there is no record to blame."""
    with monkeypatch.context() as broken:
        broken.setattr(BoundedStore, "list", _raiser(SystemExit(9)))
        for _ in range(4):
            with pytest.raises(SystemExit):
                world.ingest()
            world.control(30)
    assert _state(world).trouble == IngestState.Trouble.FAILED
    assert world.run.state == RunState.DEGRADED
    assert "progress is unknown" in world.run.state_reason
    world.beat_all()
    world.tick()
    world.tick()
    assert _state(world).trouble == ""
    assert world.run.state == RunState.RUNNING
