"""Without atomic create, only the coordinator creates objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.records import CheckpointManifest, Command, Heartbeat
from diloco.store.base import StoreDenied
from diloco.training.final_result import read_final
from diloco.training.replica_state import load_replica_state

MakeGroup = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # the lease of a killed member
)


def beats(group: Any) -> list[Heartbeat]:
    result = [info.key for info in group.store.list("members/")]
    return [Heartbeat.from_bytes(group.store.get(key)) for key in result]


def test_only_the_coordinator_creates_objects(tiny_group: MakeGroup) -> None:
    group = tiny_group(total_rounds=3, checkpoint_every=1)
    members = [group.start(n, atomic_create=False) for n in range(3)]
    group.wait()
    group.assert_agreed(*members)
    commits = group.assert_log()
    assert {commit.committer.replica for commit in commits} == {0}
    assert {group.plan(r).planner.replica for r in (1, 2, 3)} == {0}
    manifests = [
        CheckpointManifest.from_bytes(group.store.get(keys.checkpoint_manifest(r)))
        for r in range(4)
    ]
    assert {manifest.writer.replica for manifest in manifests} == {0}
    final = read_final(group.store)
    assert final is not None and final.writer.replica == 0


def test_a_run_without_its_coordinator_pauses_until_another_is_named(tiny_group: MakeGroup) -> None:
    group = tiny_group(total_rounds=4, heartbeat_timeout_s=40.0)
    trap = group.trap("create", "rounds/00000002/plan.json")
    first = group.start(0, atomic_create=False, trap=trap)
    others = [group.start(n, atomic_create=False) for n in (1, 2)]
    first.thread.join(600)
    while not any("replica 0 to plan" in beat.message for beat in beats(group)):
        others[0].thread.join(0.02)
    assert len(group.commits()) == 1, "no other replica can create objects"
    command = Command(n=1, command="committer", arguments={"replica": 2}, wall_s=0.0)
    group.store.create(keys.control(1), command.to_bytes())
    group.wait(*others)
    group.assert_agreed(*others)
    assert [c.committer.replica for c in group.assert_log()] == [0, 2, 2, 2]


def test_a_replica_that_cannot_create_objects_saves_its_state(tiny_group: MakeGroup) -> None:
    group = tiny_group(num_replicas=2, total_rounds=3, state_every=1)
    members = [group.start(n, atomic_create=False) for n in range(2)]

    def denied(key: str, data: object) -> bool:
        raise StoreDenied(f"{key}: only the coordinator can create there")

    members[1].store.create = denied
    group.wait()
    group.assert_agreed(*members)
    saved = load_replica_state(group.store, 1)
    assert saved is not None and saved.round == 2
