"""Packed rounds become the same rows as those whose records have their own objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.packed_rounds import BLOCK
from diloco.training.round_packs import pack_rounds
from runs.models import Contribution
from runs.restore import read_ahead
from tests.matrix import matrix
from tests.runs.restore.test_round_import import COMPARED, Log
from tests.runs.run_harness import Clock, incarnation

pytestmark = pytest.mark.django_db

LAST = 2 * BLOCK + 3


@pytest.fixture
def log(make_run: Callable[..., Any], clock: Clock) -> Log:
    made = Log(make_run(replicas=3), clock)
    made.write(range(1, LAST + 1))
    made.bucket.contribution(2, 2, seq=2, tokens=7)  # late
    made.bucket.plan(3, [0, 1], refused={2: "norm: expected finite, found inf"})
    made.bucket.commit(3, [0, 1])
    made.bucket.commit(4, [], void="payload of replica 1 is gone", void_replica=1)
    made.bucket.contribution(5, 77)
    return made


def ingested(log: Log) -> dict[str, Any]:
    log.ingest()
    return log.rows()


def imported(log: Log) -> dict[str, Any]:
    log.import_rounds()
    return log.rows()


def pack(log: Log) -> None:
    """As the writers of these checkpoints do."""
    store = log.bucket.store
    for round in (0, LAST - 2, LAST - 1, LAST):
        store.put(keys.checkpoint_manifest(round), b"{}")
        pack_rounds(store)
    assert [info.key for info in store.list(keys.PACKS)] == [
        keys.round_pack(1),
        keys.round_pack(BLOCK + 1),
    ]
    assert not store.list(keys.contributions(2 * BLOCK))


@matrix("read", [ingested, imported], fast=(imported,))
def test_the_rows_are_the_same(log: Log, read: Callable[[Log], dict[str, Any]]) -> None:
    expected = read(log)
    assert {c["state"] for c in expected["Contribution"]} == {"included", "late", "refused"}
    log.forget()
    pack(log)
    result = read(log)
    for name in COMPARED:
        assert result[name] == expected[name], name


def test_a_pack_that_is_too_large_to_read_ahead_is_read_in_its_turn(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = imported(log)
    log.forget()
    pack(log)
    monkeypatch.setattr(read_ahead, "BLOCK_BYTES", 1000)
    result = imported(log)
    for name in COMPARED:
        assert result[name] == expected[name], name


@pytest.mark.parametrize("read", [ingested, imported])
def test_a_damaged_pack_is_refused_by_its_key_and_stops_nothing(
    log: Log, read: Callable[[Log], dict[str, Any]]
) -> None:
    pack(log)
    log.bucket.store.put(keys.round_pack(1), b"no pack")
    result = read(log)
    log.run.refresh_from_db()
    assert log.run.next_round == LAST + 1
    refused = [e["message"] for e in result["Event"] if e["kind"] == "refused"]
    assert len(refused) == 1 and refused[0].startswith(f"{keys.round_pack(1)} refused: ")
    included = [c for c in result["Contribution"] if c["state"] == "included"]
    assert len(included) > 3 * BLOCK, "plans and commits stay"


def test_a_late_contribution_is_ingested_after_its_record_was_deleted(log: Log) -> None:
    """The server has read the planned contributions of the open round, and is away meanwhile."""
    store, bucket = log.bucket.store, log.bucket
    late = keys.contribution_record(2, 2, incarnation(2, 2))
    commit, data = store.get(keys.commit(2)), store.get(late)
    store.delete([keys.commit(2), late])
    others = keys.contribution_record(2, 2, incarnation(2, 1))
    store.delete([others])
    log.ingest()
    assert log.run.next_round == 2
    assert {c.replica.number for c in Contribution.objects.filter(round__number=2)} == {0, 1}
    store.put(late, data)
    store.put(keys.commit(2), commit)
    bucket.plan(2, [0, 1])
    bucket.commit(2, [0, 1])
    pack(log)
    log.ingest()
    found = Contribution.objects.get(round__number=2, replica__number=2)
    assert (found.state, found.tokens) == ("late", 7)
