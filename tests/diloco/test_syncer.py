"""Without atomic create there is one coordinator, which is never a syncer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco.protocol import keys

MakeGroup = Callable[..., Any]


def test_a_syncer_leaves_the_commit_to_the_coordinator(tiny_group: MakeGroup) -> None:
    group = tiny_group(reduce_plan="syncer", num_replicas=2, total_rounds=3)
    group.store.atomic_create = False  # as the syncer observes it
    group.start_syncer()
    while not group.store.list(keys.member(group.settings.max_replicas)):
        pass
    members = [group.start(n, atomic_create=False) for n in range(2)]
    group.wait()
    group.assert_agreed(*members)
    assert [group.plan(r).mode for r in (1, 2, 3)] == ["syncer"] * 3
    assert {commit.committer.replica for commit in group.commits()} == {0}
