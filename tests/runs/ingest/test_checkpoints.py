"""Checkpoints and the final manifest: stored once, refused when invalid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from diloco.protocol import keys
from diloco.protocol.records import StoredObject
from runs.ingest import checkpoints
from runs.ingest.checkpoints import ingest_checkpoints
from runs.models import Checkpoint, Run
from tests.runs.run_harness import DIGEST

pytestmark = pytest.mark.django_db
MakeHarness = Callable[..., Any]


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=2)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


def test_a_checkpoint_is_stored_with_its_round(harness: Any) -> None:
    harness.bucket.commit(1, [0, 1])
    harness.bucket.checkpoint(0)
    harness.bucket.checkpoint(1)
    harness.tick()
    rows = [(c.round, c.final, c.key, c.size_bytes, c.digest) for c in Checkpoint.objects.all()]
    folders = [keys.checkpoint_dir(n, 0, "00001-00000000") for n in (0, 1)]
    assert rows == [(n, False, f"{folders[n]}weights.safetensors", 4096, DIGEST) for n in (0, 1)]
    harness.bucket.commit(2, [0, 1])
    harness.tick()
    assert Checkpoint.objects.count() == 2


def test_a_stored_checkpoint_is_not_read_again(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.bucket.checkpoint(1)
    harness.run.next_round = 2
    ingest_checkpoints(harness.run, harness.bucket.store, now=harness.clock())
    monkeypatch.setattr(harness.bucket.store, "get", None)
    ingest_checkpoints(harness.run, harness.bucket.store, now=harness.clock())
    assert Checkpoint.objects.count() == 1


def test_an_unreadable_manifest_is_reported_and_skipped(harness: Any) -> None:
    harness.bucket.store.put(keys.checkpoint_manifest(1), b"{}")
    harness.bucket.store.put("checkpoints/notes.txt", b"hello")
    harness.bucket.checkpoint(2)
    for number in (1, 2):
        harness.bucket.commit(number, [0, 1])
    harness.tick()
    assert list(Checkpoint.objects.values_list("round", flat=True)) == [2]
    [reported] = harness.events("refused")
    assert reported.startswith(f"{keys.checkpoint_manifest(1)} refused: ")


def test_a_checkpoint_of_an_uncommitted_round_is_not_shown(harness: Any) -> None:
    harness.bucket.commit(1, [0, 1])
    harness.bucket.checkpoint(9)
    harness.tick()
    assert not Checkpoint.objects.exists()


@pytest.mark.parametrize(("round", "commits"), [(2**31 - 1, ()), (3, (1, 2)), (4, (1, 2, 4))])
def test_a_final_manifest_without_commits_does_not_end_the_run(
    harness: Any, round: int, commits: tuple[int, ...]
) -> None:
    for number in commits:
        harness.bucket.commit(number, [0, 1])
    harness.bucket.final(round, backed=False)
    for _ in range(2):
        harness.beat_all()
        assert harness.tick().state == "running"
    [reported] = harness.events("refused")
    assert reported.startswith("final/manifest.json refused: expected rounds/")
    harness.bucket.final(round=2)  # accepted as soon as the commits exist
    assert harness.tick().state == "succeeded"


def test_a_final_manifest_of_a_void_round_does_not_end_the_run(harness: Any) -> None:
    harness.bucket.commit(1, [0, 1], void="payload of replica 0 is gone", void_replica=0)
    harness.bucket.final(1)
    harness.beat_all()
    assert harness.tick().state == "running"


@pytest.mark.parametrize("body", [b"{}", b"", b"[" * 100_000])
def test_an_unreadable_final_manifest_does_not_end_the_run(harness: Any, body: bytes) -> None:
    harness.bucket.store.put(keys.FINAL_MANIFEST, body)
    for _ in range(2):
        harness.beat_all()
        assert harness.tick().state == "running"
    [reported] = harness.events("refused")
    assert reported.startswith("final/manifest.json refused: ")


def test_the_last_checkpoint_of_an_ended_run_is_still_read(harness: Any) -> None:
    harness.bucket.final(2)
    harness.tick()
    harness.bucket.checkpoint(2)
    harness.tick()
    rows = Checkpoint.objects.values_list("round", "final")
    assert sorted(rows) == [(2, False), (2, True)]


def test_invalid_text_in_a_manifest_does_not_prevent_the_end(harness: Any) -> None:
    invalid = StoredObject(key="final/weights", size_bytes=1, sha256="\ud800\x00" * 99)
    harness.bucket.final(1, weights=invalid)
    assert harness.tick().state == "succeeded"
    assert Checkpoint.objects.get().digest.startswith("?\ufffd")


@pytest.mark.parametrize("key", ["final/\x00", "final/\ud800", "final/../x", "final/" + "x" * 999])
def test_a_final_manifest_with_a_key_that_no_store_can_have_does_not_end_the_run(
    harness: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("diloco.protocol.records._named_below", lambda *named: None)
        harness.bucket.final(1, weights=StoredObject(key=key, size_bytes=1, sha256="d"))
    assert harness.tick().state == "running"
    [reported] = harness.events("refused")
    assert "expected a manifest of objects below final/" in reported


def test_an_import_reads_many_manifests_at_once(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "MANIFESTS_AT_ONCE", 3)
    for round in range(1, 11):
        harness.bucket.commit(round, (0,))
        harness.bucket.checkpoint(round)
    harness.bucket.store.put(keys.checkpoint_manifest(4), b"no manifest")
    harness.bucket.store.put(
        keys.checkpoint_manifest(5), harness.bucket.store.get(keys.checkpoint_manifest(6))
    )
    Run.objects.update(next_round=11, model_hash="")
    harness.run.refresh_from_db()
    with CaptureQueriesContext(connection) as captured:
        checkpoints.import_checkpoints(harness.run, harness.bucket.store, now=harness.clock())
    stored = harness.run.checkpoints.order_by("round").values_list("round", flat=True)
    assert list(stored) == [1, 2, 3, 6, 7, 8, 9, 10]
    assert Run.objects.get().model_hash == "m"
    assert len(harness.events("refused")) == 2
    written = [query["sql"] for query in captured if "INSERT" in query["sql"]]
    assert len([sql for sql in written if "runs_checkpoint" in sql]) == 4
