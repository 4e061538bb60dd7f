"""Launching a queued run: repeated, interrupted at any step, refused, or delayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.store.base import LocalStore, StoreUnavailable
from runs.exceptions import LaunchLater
from runs.ingest.stores import store_for
from runs.reconcile import group_publishing, launch
from runs.reconcile.launch import GIVE_UP_AFTER, launch_replica, launch_run
from tests.matrix import matrix
from tests.runs import run_harness as w
from tests.runs.launching import Killed, MakeRun, launched, one_job_each

pytestmark = pytest.mark.django_db


def test_group_and_code_are_written_before_any_job(make_run: MakeRun, outbox: list[Any]) -> None:
    run = make_run()
    outbox.clear()
    launched(run)
    assert run.state == "provisioning"
    store = store_for(run)
    group = GroupDocument.from_bytes(store.get(keys.GROUP))
    assert (group.run_id, group.name) == (str(run.pk), run.name)
    assert group.settings.to_dict() == run.group_settings
    assert (group.fingerprint, group.code) == (run.group_fingerprint, run.code_sha256)
    assert store.get(keys.code_bundle(run.code_sha256))
    assert outbox == [("launch_pool", pool.pk) for pool in run.pools.all()]


def test_launching_twice_is_launching_once(
    make_run: MakeRun, outbox: list[Any], executor: w.FakeExecutor
) -> None:
    run = launched(make_run())
    before = {i.key: store_for(run).get(i.key) for i in store_for(run).list("")}
    fingerprint, since = run.group_fingerprint, run.state_since
    launched(run)
    assert {i.key: store_for(run).get(i.key) for i in store_for(run).list("")} == before
    assert (run.group_fingerprint, run.state_since) == (fingerprint, since)
    for _ in range(2):
        for replica in run.replicas.all():
            launch_replica(replica.pk)
    one_job_each(run, executor)


def test_another_run_s_rendezvous_ends_the_launch(make_run: MakeRun, outbox: list[Any]) -> None:
    other, run = launched(make_run(name="First here")), make_run()
    store_for(run).put(keys.GROUP, store_for(other).get(keys.GROUP))
    outbox.clear()
    launched(run)
    assert run.state == "failed"
    assert f"expected an unused rendezvous for run {run.pk}" in run.state_reason
    assert f"found group.json of run {other.pk} ('First here')" in run.state_reason
    assert outbox == []


def test_an_edited_group_ends_the_launch(make_run: MakeRun) -> None:
    run = make_run()
    edited = group_publishing.group_document(run, "0" * 64)
    store_for(run).put(keys.GROUP, edited.to_bytes())
    launched(run)
    assert run.state == "failed"
    assert f"found {edited.fingerprint}" in run.state_reason


@pytest.mark.parametrize("body", [b"not json", b"{}", b'{"format": "another"}'])
def test_an_invalid_group_ends_the_launch(make_run: MakeRun, body: bytes) -> None:
    run = make_run()
    store_for(run).put(keys.GROUP, body)
    launched(run)
    assert run.state == "failed"
    assert "expected no group.json or this run's, found one that is not" in run.state_reason


def test_a_rendezvous_that_cannot_be_written_ends_the_launch(
    make_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    run = launched(make_run(rendezvous=f"{tmp_path}/file/run"))
    assert run.state == "failed"
    assert "could not be launched" in run.state_reason
    assert str(tmp_path) in run.state_reason


def test_an_unavailable_bucket_is_retried_and_then_given_up(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, clock: w.Clock
) -> None:
    def away(self: LocalStore, key: str, *, limit: int | None = None) -> bytes:
        raise StoreUnavailable("no route to bucket")

    run = make_run()
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "get", away)
        with pytest.raises(LaunchLater, match="no route"):
            launch_run(str(run.pk))
        run.refresh_from_db()
        assert run.state == "queued"
    assert launched(run).state == "provisioning"

    late = make_run()
    monkeypatch.setattr(LocalStore, "get", away)
    clock.pass_s(GIVE_UP_AFTER.total_seconds() + 1)
    assert launched(late).state == "failed"
    assert "no route to bucket" in late.state_reason


STEPS = (
    "store.create owner",
    "make_bundle",
    "store.create code",
    "store.create group",
    "transition",
    "enqueue",
)


@matrix("step", STEPS, fast=("store.create group", "transition"))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_launch_killed_at_any_step_is_finished_by_the_next(
    make_run: MakeRun,
    executor: w.FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    after: bool,
) -> None:
    run = make_run()
    die_at(monkeypatch, step, after)
    with pytest.raises(Killed):
        launch_run(str(run.pk))
    monkeypatch.undo()
    monkeypatch.setattr("runs.reconcile.launch.executor_for", lambda pool: executor)
    assert launched(run).state == "provisioning"
    store = store_for(run)
    document = GroupDocument.from_bytes(store.get(keys.GROUP))
    assert document.fingerprint == run.group_fingerprint
    assert store.get(keys.code_bundle(document.code))
    assert run.events.filter(to_state="provisioning", replica=None).count() == 1
    for replica in run.replicas.all():
        launch_replica(replica.pk)
    one_job_each(run, executor)


def die_at(monkeypatch: pytest.MonkeyPatch, step: str, after: bool) -> None:
    target: Any = group_publishing if step == "make_bundle" else launch
    name = step
    wanted = {
        "store.create owner": keys.OWNER,
        "store.create code": "code/",
        "store.create group": keys.GROUP,
    }.get(step)
    if wanted:
        target, name = LocalStore, "create"
    real = getattr(target, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if wanted and not args[1].startswith(wanted):
            return real(*args, **kwargs)
        if after:
            real(*args, **kwargs)
        raise Killed

    monkeypatch.setattr(target, name, dying)
