"""Segments that a replica has packed are ingested once, whenever the cursor meets the pack."""

from __future__ import annotations

import pytest

from diloco.protocol import keys
from diloco.protocol.packed_telemetry import BLOCK, keys_of_block, pack_key
from diloco.protocol.packed_telemetry import pack as make_pack
from diloco.protocol.reading import READS
from diloco.telemetry.compaction import pack_block
from runs.ingest import telemetry
from runs.ingest.telemetry import DELETED_AFTER
from runs.metrics.changes import Changes
from runs.models import Event
from runs.restore import bucket_reader
from tests.runs.ingest_harness import IngestHarness
from tests.runs.run_harness import incarnation

pytestmark = pytest.mark.django_db


def write(ingest: IngestHarness, first: int, last: int) -> list[float]:
    for n in range(first, last + 1):
        ingest.bucket.segment(0, n, losses=[float(n)], first=n)
    return [float(n) for n in range(first, last + 1)]


def pack(ingest: IngestHarness, first: int, last: int) -> None:
    assert pack_block(ingest.bucket.store, 0, incarnation(0), range(first, last + 1))


def ingest_all(ingest: IngestHarness) -> None:
    for _ in range(6):
        ingest.clock.pass_s(60.0)
        ingest.ingest()


def test_a_server_that_was_away_reads_packs(ingest: IngestHarness) -> None:
    losses = write(ingest, 1, BLOCK + 3)
    pack(ingest, 1, BLOCK)
    ingest_all(ingest)
    assert ingest.loss() == losses
    assert ingest.cursor().next_n == BLOCK + 4


def test_segments_packed_behind_the_cursor_are_not_read_again(ingest: IngestHarness) -> None:
    losses = write(ingest, 1, BLOCK)
    ingest_all(ingest)
    pack(ingest, 1, BLOCK)
    ingest_all(ingest)
    losses += write(ingest, BLOCK + 1, BLOCK + 1)
    ingest_all(ingest)
    assert ingest.loss() == losses


def test_segments_packed_while_the_cursor_is_among_them_are_read_once(
    ingest: IngestHarness,
) -> None:
    losses = write(ingest, 1, BLOCK)
    ingest.ingest()  # 40 of them
    assert 1 < ingest.cursor().next_n <= BLOCK
    pack(ingest, 1, BLOCK)
    ingest.ingest()
    ingest_all(ingest)
    assert ingest.loss() == losses


def test_a_pack_beside_its_segments_counts_once(ingest: IngestHarness) -> None:
    """A process was killed after it had written the pack and before it had deleted all."""
    losses = write(ingest, 1, BLOCK)
    kept = {n: ingest.bucket.store.get(key(n)) for n in (1, 7, BLOCK)}
    pack(ingest, 1, BLOCK)
    for n, data in kept.items():
        ingest.bucket.store.put(key(n), data)
    ingest_all(ingest)
    assert ingest.loss() == losses


def key(n: int) -> str:
    return keys.telemetry(0, incarnation(0), n)


def test_a_damaged_pack_is_refused_and_later_segments_are_read(ingest: IngestHarness) -> None:
    write(ingest, 1, BLOCK)
    pack(ingest, 1, BLOCK)
    ingest.bucket.store.put(pack_key(0, incarnation(0), 1), b"no pack")
    losses = write(ingest, BLOCK + 1, BLOCK + 2)
    ingest_all(ingest)
    assert ingest.loss() == losses
    assert ingest.cursor().refused == BLOCK
    assert Event.objects.filter(kind="refused", message__contains=".pack").exists()


def test_a_cursor_that_is_up_to_date_asks_for_no_pack(
    ingest: IngestHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ingest, 1, 2)
    ingest.ingest()
    asked: list[str] = []
    get = ingest.bucket.store.inner.get

    def noted(key: str, *, limit: int | None = None) -> bytes:
        asked.append(key)
        return get(key, limit=limit)

    monkeypatch.setattr(ingest.bucket.store.inner, "get", noted)
    ingest.seen = [(0, incarnation(0))]
    ingest.ingest()
    assert not [key for key in asked if "/00000/" in key and key.endswith(".pack")]


@pytest.mark.parametrize("data", [b"no pack", None], ids=["damaged", "empty segments"])
def test_a_hostile_pack_is_read_once_in_a_pass(
    ingest: IngestHarness, monkeypatch: pytest.MonkeyPatch, data: bytes | None
) -> None:
    """A pack can have 16 MiB and every pass reads 40 segments."""
    first = pack_key(0, incarnation(0), 1)
    segments = dict.fromkeys(range(1, BLOCK + 1), b"")
    ingest.bucket.store.put(first, data or make_pack(0, incarnation(0), segments))
    asked: list[str] = []
    get = ingest.bucket.store.inner.get

    def noted(key: str, *, limit: int | None = None) -> bytes:
        asked.append(key)
        return get(key, limit=limit)

    monkeypatch.setattr(ingest.bucket.store.inner, "get", noted)
    ingest.seen = [(0, incarnation(0))]
    ingest.ingest()
    assert asked.count(first) <= READS
    assert ingest.cursor().refused > 1


def delete_block(ingest: IngestHarness, first: int) -> None:
    ingest.bucket.store.delete(keys_of_block(0, incarnation(0), first))


def test_a_server_that_was_away_for_longer_than_telemetry_is_kept_reads_the_rest(
    ingest: IngestHarness,
) -> None:
    write(ingest, 1, BLOCK)
    losses = write(ingest, BLOCK + 1, BLOCK + 3)
    delete_block(ingest, 1)
    ingest_all(ingest)
    assert not ingest.loss()  # the first segments can be late
    ingest.clock.pass_s(DELETED_AFTER.total_seconds())
    ingest_all(ingest)
    assert ingest.loss() == losses
    assert ingest.cursor().next_n == BLOCK + 4
    [event] = Event.objects.filter(kind="refused")
    assert event.message.startswith(f"{key(1)} refused: expected the segments up to {key(BLOCK)}")


def test_packs_of_a_process_that_has_ended_are_read_in_passes_that_follow_at_once(
    ingest: IngestHarness,
) -> None:
    """A pass reads fewer segments than a pack has."""
    losses = write(ingest, 1, 2 * BLOCK + 3)
    pack(ingest, 1, BLOCK)
    pack(ingest, BLOCK + 1, 2 * BLOCK)
    ingest.ended = frozenset({0})
    for _ in range(6):
        ingest.clock.pass_s(1.0)
        ingest.ingest()
    assert ingest.loss() == losses
    assert ingest.cursor().ended
    assert not Event.objects.filter(kind="refused").exists()


@pytest.mark.parametrize("ended", [frozenset({0}), frozenset()])
def test_an_import_reads_all_packs(ingest: IngestHarness, ended: frozenset[int]) -> None:
    losses = write(ingest, 1, 2 * BLOCK + 3)
    pack(ingest, 1, BLOCK)
    pack(ingest, BLOCK + 1, 2 * BLOCK)
    names = {0: incarnation(0)}
    bucket_reader._read_all(ingest.run, ingest.bucket.store, names, ended=ended, changes=Changes())
    assert ingest.loss() == losses


def test_a_replica_that_waits_is_listed_once_in_half_an_hour(
    ingest: IngestHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ingest, 1, 2)
    ingest.ingest()
    asked: list[int] = []
    monkeypatch.setattr(telemetry, "find_gap", lambda _, cursor: asked.append(cursor.next_n))
    for _ in range(9):
        ingest.clock.pass_s(DELETED_AFTER.total_seconds() / 4)
        ingest.ingest()
    assert sorted(asked) == [1, 3]  # of two replicas
    ingest.clock.pass_s(DELETED_AFTER.total_seconds())
    ingest.ingest()
    assert sorted(asked) == [1, 1, 3, 3]


def test_a_process_that_has_ended_is_read_to_its_end(ingest: IngestHarness) -> None:
    write(ingest, 1, BLOCK)
    losses = write(ingest, BLOCK + 1, BLOCK + 1)
    delete_block(ingest, 1)
    ingest.ended = frozenset({0})
    ingest_all(ingest)
    assert ingest.loss() == losses
    assert ingest.cursor().ended
