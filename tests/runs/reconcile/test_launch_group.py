"""``group.json`` stays what it was when the run was launched: replicas do whatever it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument, fingerprint_of
from executors.base import Cause
from runs.states import ReplicaState

pytestmark = pytest.mark.django_db


def _forged(data: bytes) -> bytes:
    """With other settings and the fingerprint of these."""
    body = json.loads(data)
    body["workload"]["layers"] = 99
    del body["fingerprint"]
    body["fingerprint"] = fingerprint_of(json.dumps(body).encode())
    return json.dumps(body).encode()


@pytest.mark.parametrize("how", ["forged", "damaged", "removed"])
def test_a_replica_is_not_launched_again_with_a_group_json_that_others_wrote(
    make_world: Callable[..., Any], how: str
) -> None:
    world = make_world(replicas=2, total_rounds=70)
    world.start()
    store = world.bucket.store
    data = store.get(keys.GROUP)
    if how == "removed":
        store.delete([keys.GROUP])
    else:
        store.put(keys.GROUP, _forged(data) if how == "forged" else b"[" * 500)
    launches = world.executor.launches
    world.executor.end(world.key(0), Cause.LOST, said="the machine is gone")
    for _ in range(4):
        world.tick(60)
        world.work()
    replica = world.replica(0)
    assert world.executor.launches == launches
    assert replica.state == ReplicaState.FAILED
    assert keys.GROUP in replica.state_reason
    if how == "forged":
        assert GroupDocument.from_bytes(data).fingerprint in replica.state_reason


def test_the_fingerprint_does_not_depend_on_what_this_library_knows(
    make_world: Callable[..., Any],
) -> None:
    world = make_world(replicas=1)
    data = world.bucket.store.get(keys.GROUP)
    assert fingerprint_of(data) == world.run.group_fingerprint
    body = json.loads(data)
    body["settings"]["of_a_newer_library"] = 1
    assert fingerprint_of(json.dumps(body).encode()) not in ("", world.run.group_fingerprint)
    assert fingerprint_of(b"[]") == fingerprint_of(b"no") == ""
