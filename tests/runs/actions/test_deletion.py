"""Deleting a run: who may not be, what goes, what stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry

from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.ownership import PrefixOwner
from executors.base import Cause
from runs.actions import lifecycle
from runs.actions.deletion import DeletionPlan, Part, delete_run, plan_deletion
from runs.exceptions import CannotDo, LaunchLater
from runs.models import Run
from runs.reconcile.bucket_writes import write_run

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
    lifecycle.delete(world.run, actor=world.run.owner, name=name, objects=objects)
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


FOREIGN = (
    "code/train.py", "checkpoints/best.safetensors", "rounds/notes.txt", "control/00000001.bak",
    "state/mine/manifest.json", "heal/x", "final/model.safetensors", "sagemaker/output.tar.gz",
    "telemetry/report.json", "members/list.txt", "group.json.orig",
)  # fmt: skip


def test_nothing_is_written_for_a_run_that_is_being_deleted(world: Any) -> None:
    lifecycle.describe(world.run, actor=world.run.owner, notes="kept?", tags=())
    lifecycle.delete(world.run, actor=world.run.owner, name="Test run", objects=True)
    before = objects(world)
    assert write_run(str(world.run.pk)) == ""
    assert objects(world) == before
    delete_run(str(world.run.pk))
    assert write_run(str(world.run.pk)) == ""
    assert objects(world) == []


def test_what_is_not_of_the_run_stays_wherever_it_lies(world: Any) -> None:
    store = world.bucket.store
    for key in FOREIGN:
        store.put(key, b"mine")
    plan = plan_deletion(world.run)
    assert (plan.kept, plan.kept_bytes, plan.refusal, plan.whole) == (len(FOREIGN), 44, "", True)
    assert sorted(plan.kept_names) == sorted(FOREIGN)
    assert plan.objects == len(objects(world)) - len(FOREIGN)
    assert {part.kind for part in plan.deleted} >= {"group", "owner", "code", "lease", "telemetry"}
    delete(world, objects=True)
    assert objects(world) == sorted(FOREIGN)


def test_nothing_of_the_run_is_left_in_its_folder(world: Any) -> None:
    root = folder(world)
    (root / "rounds" / "00000009" / "contributions").mkdir(parents=True)
    (root / "rounds" / ".x.0123456789ab.tmp").write_bytes(b"of another program")
    leftover = root / "rounds" / "00000009" / ".plan.json.0123456789ab.tmp"
    leftover.write_bytes(b"of a writer that was killed")
    delete(world, objects=True)
    assert [path.name for path in root.rglob("*")] == ["rounds", ".x.0123456789ab.tmp"]


def test_an_empty_folder_goes_and_one_that_others_use_stays(world: Any) -> None:
    root = folder(world)
    (root / "mine").mkdir()
    delete(world, objects=True)
    assert [path.name for path in root.iterdir()] == ["mine"]
    (root / "mine").rmdir()


def test_the_folder_goes_with_its_last_object(world: Any) -> None:
    root = folder(world)
    delete(world, objects=True)
    assert not root.exists()
    assert root.parent.exists()


def test_a_link_in_the_folder_leads_a_deletion_nowhere(world: Any, tmp_path: Path) -> None:
    root, outside = folder(world), tmp_path / "outside"
    outside.mkdir()
    names = [f"{'0' * 64}.zip", "00000001.json", "manifest.json"]
    for name in names:
        (outside / name).write_text("of another")
    for name in ("code", "control"):
        (root / name).rename(tmp_path / name)
        (root / name).symlink_to(outside)
    delete(world, objects=True)
    assert sorted(path.name for path in outside.iterdir()) == sorted(names)
    assert sorted(path.name for path in root.iterdir()) == ["code", "control"]


@pytest.mark.parametrize("after", [1, 2, 5, 100])
def test_a_deletion_that_was_killed_goes_on(
    world: Any, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """After so many deleted objects; the marker says to the end whose the prefix is."""
    store, deleted = world.bucket.store, 0
    store.put("notes.txt", b"mine")
    real = type(store).delete

    def killed(self: Any, keys: Any) -> None:
        nonlocal deleted
        for key in keys:
            deleted += 1
            if deleted == after:
                raise KeyboardInterrupt
            real(self, [key])

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "delete", killed)
        if after < 100:
            with pytest.raises(KeyboardInterrupt):
                delete(world, objects=True)
            assert Run.objects.exists()
    if after == 100:
        lifecycle.delete(world.run, actor=world.run.owner, name="Test run", objects=True)
    assert plan_deletion(world.run).refusal == ""
    delete_run(str(world.run.pk))
    assert objects(world) == ["notes.txt"]
    assert not Run.objects.exists()


def test_the_marker_goes_last(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    store = world.bucket.store
    real = type(store).delete

    def noting(self: Any, keys: Any) -> None:
        order.extend(keys)
        real(self, keys := list(keys))

    monkeypatch.setattr(type(store), "delete", noting)
    delete(world, objects=True)
    assert order[-2:] == [keys.GROUP, keys.OWNER]


def test_a_prefix_with_another_run_s_marker_is_left_alone(world: Any) -> None:
    store = world.bucket.store
    store.put(keys.OWNER, PrefixOwner(run_id="another").to_bytes())
    before = objects(world)
    assert "found that of another" in plan_deletion(world.run).refusal
    delete(world, objects=True)
    assert objects(world) == before
    assert "found that of another" in Run.objects.get().events.latest("id").message


def test_a_run_that_was_never_launched_deletes_nothing(make_run: Any, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "code" / f"{'0' * 64}.zip"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    run = make_run(rendezvous=str(tmp_path / "mine"))
    Run.objects.update(state="failed")
    run.refresh_from_db()
    plan = plan_deletion(run)
    assert (plan.objects, plan.kept) == (0, 1)
    lifecycle.delete(run, actor=run.owner, name=run.name, objects=True)
    delete_run(str(run.pk))
    assert not Run.objects.exists()
    assert mine.exists()


def test_a_plan_of_a_bucket_that_is_away_says_so(world: Any, monkeypatch: Any) -> None:
    from diloco.store.base import StoreUnavailable

    def away(run: Any) -> Any:
        raise StoreUnavailable("503")

    monkeypatch.setattr("runs.actions.deletion.store_for", away)
    assert plan_deletion(world.run) == DeletionPlan(refusal="503")


def test_a_plan_of_many_objects_is_not_whole(world: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("runs.actions.deletion.LISTED", 2)
    plan = plan_deletion(world.run)
    assert (plan.whole, plan.objects + plan.kept) == (False, 2)
    assert isinstance(plan.deleted[0], Part)


def folder(world: Any) -> Path:
    return Path(world.bucket.store.uri.removeprefix("file://"))


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
    inner = make_run(name="inner")  # of a version that let prefixes overlap
    Run.objects.filter(pk=inner.pk).update(rendezvous=f"{world.run.rendezvous}/inner")
    with pytest.raises(CannotDo, match="'inner' lies inside"):
        delete(world, objects=True)
    Run.objects.filter(pk=inner.pk).update(rendezvous=world.run.rendezvous + "x")
    delete(world, objects=True)
    assert list(Run.objects.values_list("name", flat=True)) == ["inner"]


def test_a_bucket_that_is_another_runs_by_now_is_left_alone(world: Any) -> None:
    world.bucket.store.delete([keys.OWNER])  # of a run from before there were markers
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
    from diloco.store.base import StoreUnavailable

    def away(run: Any) -> Any:
        raise StoreUnavailable("503")

    monkeypatch.setattr("runs.actions.deletion.store_for", away)
    with pytest.raises(LaunchLater, match="503"):
        delete(world, objects=True)
    assert Run.objects.get().delete_requested_at is not None
    monkeypatch.undo()
    delete_run(str(world.run.pk))
    assert not Run.objects.exists()
