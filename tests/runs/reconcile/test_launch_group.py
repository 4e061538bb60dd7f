"""``group.json`` must not change after the launch, because replicas follow it."""

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
    """Change a setting and update the fingerprint to match."""
    body = json.loads(data)
    body["workload"]["layers"] = 99
    del body["fingerprint"]
    body["fingerprint"] = fingerprint_of(json.dumps(body).encode())
    return json.dumps(body).encode()


@pytest.mark.parametrize("how", ["forged", "damaged", "removed"])
def test_a_replica_does_not_relaunch_with_a_foreign_group_json(
    make_harness: Callable[..., Any], how: str
) -> None:
    harness = make_harness(replicas=2, total_rounds=70)
    harness.start()
    store = harness.bucket.store
    data = store.get(keys.GROUP)
    if how == "removed":
        store.delete([keys.GROUP])
    else:
        store.put(keys.GROUP, _forged(data) if how == "forged" else b"[" * 500)
    launches = harness.executor.launches
    harness.executor.end(harness.key(0), Cause.LOST, message="the machine is gone")
    for _ in range(4):
        harness.tick(60)
        harness.work()
    replica = harness.replica(0)
    assert harness.executor.launches == launches
    assert replica.state == ReplicaState.FAILED
    assert keys.GROUP in replica.state_reason
    if how == "forged":
        assert GroupDocument.from_bytes(data).fingerprint in replica.state_reason


def test_the_fingerprint_does_not_depend_on_the_library_version(
    make_harness: Callable[..., Any],
) -> None:
    harness = make_harness(replicas=1)
    data = harness.bucket.store.get(keys.GROUP)
    assert fingerprint_of(data) == harness.run.group_fingerprint
    body = json.loads(data)
    body["settings"]["of_a_newer_library"] = 1
    assert fingerprint_of(json.dumps(body).encode()) not in ("", harness.run.group_fingerprint)
    assert fingerprint_of(b"[]") == fingerprint_of(b"no") == ""
