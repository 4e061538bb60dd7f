"""Deleting a run: preconditions, deleted objects, kept objects."""

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
from runs.exceptions import ActionRefused, LaunchLater
from runs.models import Run
from runs.reconcile.bucket_writes import write_run

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def ended(share_harness: Callable[..., Any]) -> Any:
    """An ended run whose jobs have ended, too."""

    def end(made: Any) -> None:
        made.bucket.segment(0, 1, losses=(3.0,), logs=(made.bucket.log("line"),))
        made.bucket.commit(1, (0,))
        made.bucket.checkpoint(0)
        made.start()
        made.bucket.final(1)
        made.executor.end(made.key(), Cause.DONE, code=0)
        made.tick()
        made.tick()
        assert made.run.state == "succeeded"

    return share_harness(end, replicas=1)


@pytest.fixture
def harness(ended: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(ended)


def delete(harness: Any, *, objects: bool = False, name: str = "Test run") -> None:
    lifecycle.delete(harness.run, actor=harness.run.owner, name=name, objects=objects)
    assert ("delete_run", str(harness.run.pk)) in harness.outbox
    delete_run(str(harness.run.pk))


def objects(harness: Any) -> list[str]:
    return [info.key for info in harness.bucket.store.list("")]


def test_rows_are_deleted_and_objects_kept_by_default(harness: Any) -> None:
    before = objects(harness)
    delete(harness)
    assert not Run.objects.exists()
    assert set(before) <= set(objects(harness))
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.object_repr) == ("olga", "Test run")
    assert entry.change_message == "its objects are kept"
    delete_run(str(harness.run.pk))  # delivered twice


def test_only_objects_of_the_protocol_are_deleted(harness: Any) -> None:
    store = harness.bucket.store
    store.put("notes.txt", b"a note")
    outside = Path(store.uri.removeprefix("file://")).parent / "beside"
    outside.write_text("a file of another user")
    delete(harness, objects=True)
    assert not Run.objects.exists()
    assert objects(harness) == ["notes.txt"]
    assert outside.exists()


FOREIGN = (
    "code/train.py",
    "checkpoints/best.safetensors",
    "rounds/notes.txt",
    "control/00000001.bak",
    "state/mine/manifest.json",
    "heal/x",
    "final/model.safetensors",
    "sagemaker/output.tar.gz",
    "telemetry/report.json",
    "members/list.txt",
    "group.json.orig",
)


def test_nothing_is_written_for_a_run_that_is_being_deleted(harness: Any) -> None:
    lifecycle.describe(harness.run, actor=harness.run.owner, notes="kept?", tags=())
    lifecycle.delete(harness.run, actor=harness.run.owner, name="Test run", objects=True)
    before = objects(harness)
    assert write_run(str(harness.run.pk)) == ""
    assert objects(harness) == before
    delete_run(str(harness.run.pk))
    assert write_run(str(harness.run.pk)) == ""
    assert objects(harness) == []


def test_foreign_objects_are_kept_everywhere(harness: Any) -> None:
    store = harness.bucket.store
    for key in FOREIGN:
        store.put(key, b"a note")
    plan = plan_deletion(harness.run)
    assert (plan.kept, plan.kept_bytes, plan.refusal, plan.whole) == (
        len(FOREIGN),
        6 * len(FOREIGN),
        "",
        True,
    )
    assert sorted(plan.kept_names) == sorted(FOREIGN)
    assert plan.objects == len(objects(harness)) - len(FOREIGN)
    assert {part.kind for part in plan.deleted} >= {"group", "owner", "code", "lease", "telemetry"}
    delete(harness, objects=True)
    assert objects(harness) == sorted(FOREIGN)


def test_nothing_of_the_run_is_left_in_its_folder(harness: Any) -> None:
    root = folder(harness)
    (root / "rounds" / "00000009" / "contributions").mkdir(parents=True)
    (root / "rounds" / ".x.0123456789ab.tmp").write_bytes(b"of another program")
    leftover = root / "rounds" / "00000009" / ".plan.json.0123456789ab.tmp"
    leftover.write_bytes(b"of a writer that was killed")
    delete(harness, objects=True)
    assert [path.name for path in root.rglob("*")] == ["rounds", ".x.0123456789ab.tmp"]


def test_an_empty_folder_is_deleted_and_a_shared_one_kept(harness: Any) -> None:
    root = folder(harness)
    (root / "mine").mkdir()
    delete(harness, objects=True)
    assert [path.name for path in root.iterdir()] == ["mine"]
    (root / "mine").rmdir()


def test_the_folder_is_deleted_with_its_last_object(harness: Any) -> None:
    root = folder(harness)
    delete(harness, objects=True)
    assert not root.exists()
    assert root.parent.exists()


def test_a_deletion_does_not_follow_links(harness: Any, tmp_path: Path) -> None:
    root, outside = folder(harness), tmp_path / "outside"
    outside.mkdir()
    names = [f"{'0' * 64}.zip", "00000001.json", "manifest.json"]
    for name in names:
        (outside / name).write_text("of another")
    for name in ("code", "control"):
        (root / name).rename(tmp_path / name)
        (root / name).symlink_to(outside)
    delete(harness, objects=True)
    assert sorted(path.name for path in outside.iterdir()) == sorted(names)
    assert sorted(path.name for path in root.iterdir()) == ["code", "control"]


@pytest.mark.parametrize("after", [1, 2, 5, 100])
def test_a_killed_deletion_is_continued(
    harness: Any, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Killed after some objects; the marker identifies the owner until the end."""
    store, deleted = harness.bucket.store, 0
    store.put("notes.txt", b"a note")
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
                delete(harness, objects=True)
            assert Run.objects.exists()
    if after == 100:
        lifecycle.delete(harness.run, actor=harness.run.owner, name="Test run", objects=True)
    assert plan_deletion(harness.run).refusal == ""
    delete_run(str(harness.run.pk))
    assert objects(harness) == ["notes.txt"]
    assert not Run.objects.exists()


def test_the_marker_is_deleted_last(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    store = harness.bucket.store
    real = type(store).delete

    def noting(self: Any, keys: Any) -> None:
        order.extend(keys)
        real(self, keys := list(keys))

    monkeypatch.setattr(type(store), "delete", noting)
    delete(harness, objects=True)
    assert order[-2:] == [keys.GROUP, keys.OWNER]


def test_a_prefix_with_another_run_s_marker_is_left_alone(harness: Any) -> None:
    store = harness.bucket.store
    store.put(keys.OWNER, PrefixOwner(run_id="another").to_bytes())
    before = objects(harness)
    assert "found that of another" in plan_deletion(harness.run).refusal
    delete(harness, objects=True)
    assert objects(harness) == before
    assert "found that of another" in Run.objects.get().events.latest("id").message


def test_a_run_that_was_never_launched_deletes_nothing(make_run: Any, tmp_path: Path) -> None:
    own = tmp_path / "mine" / "code" / f"{'0' * 64}.zip"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    run = make_run(rendezvous=str(tmp_path / "mine"))
    Run.objects.filter(pk=run.pk).update(state="failed")
    run.refresh_from_db()
    plan = plan_deletion(run)
    assert (plan.objects, plan.kept) == (0, 1)
    lifecycle.delete(run, actor=run.owner, name=run.name, objects=True)
    delete_run(str(run.pk))
    assert not Run.objects.filter(pk=run.pk).exists()
    assert own.exists()


def test_a_plan_reports_an_unavailable_bucket(harness: Any, monkeypatch: Any) -> None:
    from diloco.store.base import StoreUnavailable

    def away(run: Any) -> Any:
        raise StoreUnavailable("503")

    monkeypatch.setattr("runs.actions.deletion.store_for", away)
    assert plan_deletion(harness.run) == DeletionPlan(refusal="503")


def test_a_plan_of_many_objects_is_incomplete(harness: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("runs.actions.deletion.LISTED", 2)
    plan = plan_deletion(harness.run)
    assert (plan.whole, plan.objects + plan.kept) == (False, 2)
    assert isinstance(plan.deleted[0], Part)


def folder(harness: Any) -> Path:
    return Path(harness.bucket.store.uri.removeprefix("file://"))


@pytest.mark.parametrize("state", ["running", "paused", "stopping", "queued"])
def test_only_an_ended_run_is_deleted(harness: Any, state: str) -> None:
    Run.objects.update(state=state)
    with pytest.raises(ActionRefused, match=f"found one {state}"):
        delete(harness)
    assert Run.objects.get().delete_requested_at is None


def test_the_name_must_be_typed(harness: Any) -> None:
    with pytest.raises(
        ActionRefused, match="expected the name of the run, 'Test run', found 'test run'"
    ):
        delete(harness, name="test run")


def test_a_job_that_can_still_run_prevents_the_deletion(harness: Any) -> None:
    harness.replica().attempts.update(ended_at=None)
    with pytest.raises(ActionRefused, match="still being released"):
        delete(harness)


def test_a_run_inside_its_prefix_keeps_the_objects(harness: Any, make_run: Any) -> None:
    inner = make_run(name="inner")  # of a version that let prefixes overlap
    Run.objects.filter(pk=inner.pk).update(rendezvous=f"{harness.run.rendezvous}/inner")
    with pytest.raises(ActionRefused, match="'inner' is inside"):
        delete(harness, objects=True)
    Run.objects.filter(pk=inner.pk).update(rendezvous=harness.run.rendezvous + "x")
    delete(harness, objects=True)
    assert list(Run.objects.values_list("name", flat=True)) == ["inner"]


def test_a_bucket_that_now_belongs_to_another_run_is_kept(harness: Any) -> None:
    harness.bucket.store.delete([keys.OWNER])  # of a run from before there were markers
    document = GroupDocument.from_bytes(harness.bucket.store.get(keys.GROUP))
    other = GroupDocument(**{**vars(document), "run_id": "another"})
    harness.bucket.store.put(keys.GROUP, other.to_bytes())
    before = objects(harness)
    delete(harness, objects=True)
    assert objects(harness) == before
    run = Run.objects.get()
    assert run.delete_requested_at is None
    assert "was not deleted: " in run.events.filter(kind="deleted").latest("id").message


def test_an_unavailable_bucket_is_retried(harness: Any, monkeypatch: Any) -> None:
    from diloco.store.base import StoreUnavailable

    def away(run: Any) -> Any:
        raise StoreUnavailable("503")

    monkeypatch.setattr("runs.actions.deletion.store_for", away)
    with pytest.raises(LaunchLater, match="503"):
        delete(harness, objects=True)
    assert Run.objects.get().delete_requested_at is not None
    monkeypatch.undo()
    delete_run(str(harness.run.pk))
    assert not Run.objects.exists()
