"""A store without an atomic create: one named replica creates, and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.records import Beat, CheckpointManifest, Command
from diloco.training.checkpoint import read_final

MakeGroup = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # the lease of a killed member
)


def beats(group: Any) -> list[Beat]:
    found = [info.key for info in group.store.list("members/")]
    return [Beat.from_bytes(group.store.get(key)) for key in found]


def test_only_the_committer_creates_anything(tiny_group: MakeGroup) -> None:
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


def test_without_its_committer_the_run_stands_until_another_is_named(tiny_group: MakeGroup) -> None:
    group = tiny_group(total_rounds=4, heartbeat_timeout_s=40.0)
    trap = group.trap("create", "rounds/00000002/plan.json")
    first = group.start(0, atomic_create=False, trap=trap)
    others = [group.start(n, atomic_create=False) for n in (1, 2)]
    first.thread.join(60)
    while not any("replica 0 is to plan" in beat.message for beat in beats(group)):
        others[0].thread.join(0.02)
    assert len(group.commits()) == 1, "nobody else may create"
    command = Command(n=1, command="committer", arguments={"replica": 2}, wall_s=0.0)
    group.store.create(keys.control(1), command.to_bytes())
    group.wait(*others)
    group.assert_agreed(*others)
    assert [c.committer.replica for c in group.assert_log()] == [0, 2, 2, 2]
