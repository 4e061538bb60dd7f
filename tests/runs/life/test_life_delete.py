"""Deleting a run: who may not be, what goes, what stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry

from diloco.rendezvous import keys
from diloco.rendezvous.document import GroupDocument
from executors.base import Cause
from runs import life
from runs.deletion import FOLDERS, delete_run
from runs.exceptions import CannotDo, LaunchLater
from runs.models import Run

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    """A run that is over, all of its jobs too."""
    made = make_world(replicas=1)
    made.bucket.segment(0, 1, losses=(3.0,), logs=(made.bucket.log("line"),))
    made.bucket.commit(1, (0,))
    made.bucket.checkpoint(0)
    made.start()
    made.bucket.final(1)
    made.executor.end(made.key(), Cause.DONE, code=0)
    made.tick()
    made.tick()
    assert made.run.state == "succeeded"
    return made


def delete(world: Any, *, objects: bool = False, name: str = "Test run") -> None:
    life.delete(world.run, actor=world.run.owner, name=name, objects=objects)
    assert ("delete_run", str(world.run.pk)) in world.outbox
    delete_run(str(world.run.pk))


def objects(world: Any) -> list[str]:
    return [info.key for info in world.bucket.store.list("")]


def test_rows_go_and_objects_stay_unless_asked_for(world: Any) -> None:
    before = objects(world)
    delete(world)
    assert not Run.objects.exists()
    assert set(before) <= set(objects(world))
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.object_repr) == ("olga", "Test run")
    assert entry.change_message == "its objects are kept"
    delete_run(str(world.run.pk))  # delivered twice


def test_objects_go_with_it_and_only_those_of_the_protocol(world: Any) -> None:
    store = world.bucket.store
    store.put("notes.txt", b"mine")
    outside = Path(store.uri.removeprefix("file://")).parent / "beside"
    outside.write_text("of somebody else")
    delete(world, objects=True)
    assert not Run.objects.exists()
    assert objects(world) == ["notes.txt"]
    assert outside.exists()


def test_every_folder_of_the_protocol_is_known() -> None:
    made = [
        keys.code_bundle("0" * 64), keys.beat(0, "00001-00000000"), keys.plan(1), keys.control(1),
        keys.checkpoint_manifest(0), keys.replica_state(0) + "x", keys.FINAL_MANIFEST,
        keys.telemetry(0, "00001-00000000", 1), keys.journal(1), keys.final_dir(0, "x") + "x",
    ]  # fmt: skip
    assert all(key.startswith(FOLDERS) for key in made)


@pytest.mark.parametrize("state", ["running", "paused", "stopping", "queued"])
def test_only_a_run_that_is_over_is_deleted(world: Any, state: str) -> None:
    Run.objects.update(state=state)
    with pytest.raises(CannotDo, match=f"found one {state}"):
        delete(world)
    assert Run.objects.get().delete_requested_at is None


def test_the_name_must_be_typed(world: Any) -> None:
    with pytest.raises(
        CannotDo, match="expected the name of the run, 'Test run', found 'test run'"
    ):
        delete(world, name="test run")


def test_a_job_that_may_still_run_keeps_it(world: Any) -> None:
    world.replica().attempts.update(ended_at=None)
    with pytest.raises(CannotDo, match="still being released"):
        delete(world)


def test_a_run_inside_its_prefix_keeps_the_objects(world: Any, make_run: Any) -> None:
    inner = make_run(name="inner", rendezvous=f"{world.run.rendezvous}/inner")
    with pytest.raises(CannotDo, match="'inner' lies inside"):
        delete(world, objects=True)
    Run.objects.filter(pk=inner.pk).update(rendezvous=world.run.rendezvous + "x")
    delete(world, objects=True)
    assert list(Run.objects.values_list("name", flat=True)) == ["inner"]


def test_a_bucket_that_is_another_runs_by_now_is_left_alone(world: Any) -> None:
    document = GroupDocument.from_bytes(world.bucket.store.get(keys.GROUP))
    other = GroupDocument(**{**vars(document), "run_id": "another"})
    world.bucket.store.put(keys.GROUP, other.to_bytes())
    before = objects(world)
    delete(world, objects=True)
    assert objects(world) == before
    run = Run.objects.get()
    assert run.delete_requested_at is None
    assert "was not deleted: " in run.events.filter(kind="deleted").latest("id").message


def test_a_bucket_that_is_away_is_tried_again(world: Any, monkeypatch: Any) -> None:
    from diloco.rendezvous.store import StoreUnavailable

    def away(run: Any) -> Any:
        raise StoreUnavailable("503")

    monkeypatch.setattr("runs.deletion.store_for", away)
    with pytest.raises(LaunchLater, match="503"):
        delete(world, objects=True)
    assert Run.objects.get().delete_requested_at is not None
    monkeypatch.undo()
    delete_run(str(world.run.pk))
    assert not Run.objects.exists()
