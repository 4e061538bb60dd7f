"""Checkpoints and the final manifest: read once, refused when they are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.records import StoredObject
from runs.ingest.checkpoints import ingest_checkpoints
from runs.models import Checkpoint
from tests.runs.world import DIGEST

pytestmark = pytest.mark.django_db
MakeWorld = Callable[..., Any]


@pytest.fixture
def world(make_world: MakeWorld) -> Any:
    made = make_world(replicas=2)
    made.start()
    return made


def test_a_checkpoint_comes_with_its_round(world: Any) -> None:
    world.bucket.commit(1, [0, 1])
    world.bucket.checkpoint(0)
    world.bucket.checkpoint(1)
    world.tick()
    rows = [(c.round, c.final, c.key, c.size_bytes, c.digest) for c in Checkpoint.objects.all()]
    folders = [keys.checkpoint_dir(n, 0, "00001-00000000") for n in (0, 1)]
    assert rows == [(n, False, f"{folders[n]}weights.safetensors", 4096, DIGEST) for n in (0, 1)]
    world.bucket.commit(2, [0, 1])
    world.tick()
    assert Checkpoint.objects.count() == 2


def test_a_checkpoint_that_is_in_the_table_is_not_read_again(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.bucket.checkpoint(1)
    world.run.next_round = 2
    ingest_checkpoints(world.run, world.bucket.store, now=world.clock())
    monkeypatch.setattr(world.bucket.store, "get", None)
    ingest_checkpoints(world.run, world.bucket.store, now=world.clock())
    assert Checkpoint.objects.count() == 1


def test_a_manifest_that_cannot_be_read_is_named_and_passed(world: Any) -> None:
    world.bucket.store.put(keys.checkpoint_manifest(1), b"{}")
    world.bucket.store.put("checkpoints/notes.txt", b"hello")
    world.bucket.checkpoint(2)
    for number in (1, 2):
        world.bucket.commit(number, [0, 1])
    world.tick()
    assert list(Checkpoint.objects.values_list("round", flat=True)) == [2]
    [told] = world.events("refused")
    assert told.startswith(f"{keys.checkpoint_manifest(1)} refused: ")


def test_a_checkpoint_of_a_round_that_is_not_committed_is_not_shown(world: Any) -> None:
    world.bucket.commit(1, [0, 1])
    world.bucket.checkpoint(9)
    world.tick()
    assert not Checkpoint.objects.exists()


@pytest.mark.parametrize(("round", "commits"), [(2**31 - 1, ()), (3, (1, 2)), (4, (1, 2, 4))])
def test_a_final_manifest_without_its_commits_ends_nothing(
    world: Any, round: int, commits: tuple[int, ...]
) -> None:
    for number in commits:
        world.bucket.commit(number, [0, 1])
    world.bucket.final(round, backed=False)
    for _ in range(2):
        world.beat_all()
        assert world.tick().state == "running"
    [told] = world.events("refused")
    assert told.startswith("final/manifest.json refused: expected rounds/")
    world.bucket.final(round=2)  # it is taken as soon as the commits are there
    assert world.tick().state == "succeeded"


def test_a_final_manifest_of_a_void_round_ends_nothing(world: Any) -> None:
    world.bucket.commit(1, [0, 1], void="payload of replica 0 is gone", void_replica=0)
    world.bucket.final(1)
    world.beat_all()
    assert world.tick().state == "running"


@pytest.mark.parametrize("body", [b"{}", b"", b"[" * 100_000])
def test_a_final_manifest_that_cannot_be_read_ends_nothing(world: Any, body: bytes) -> None:
    world.bucket.store.put(keys.FINAL_MANIFEST, body)
    for _ in range(2):
        world.beat_all()
        assert world.tick().state == "running"
    [told] = world.events("refused")
    assert told.startswith("final/manifest.json refused: ")


def test_the_last_checkpoint_of_a_run_that_is_over_is_still_read(world: Any) -> None:
    world.bucket.final(2)
    world.tick()
    world.bucket.checkpoint(2)
    world.tick()
    rows = Checkpoint.objects.values_list("round", "final")
    assert sorted(rows) == [(2, False), (2, True)]


def test_odd_text_in_a_manifest_does_not_stop_the_end(world: Any) -> None:
    odd = StoredObject(key="final/\ud800\x00", size_bytes=1, sha256="\ud800" * 99)
    world.bucket.final(1, weights=odd)
    assert world.tick().state == "succeeded"
    assert Checkpoint.objects.get().key == "final/?\ufffd"
