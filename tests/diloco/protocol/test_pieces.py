"""Objects that several ranks have written: keys, ranges and checksums of their pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.protocol import keys, object_digest, pieces
from diloco.protocol.keys import Kind
from diloco.protocol.object_digest import ObjectDigest, checksum_of
from diloco.protocol.pieces import Part, keys_of, part_count, parts_of, piece_key, read_range
from diloco.protocol.records import BadRecord, CheckpointManifest, Identity, StoredObject
from diloco.store.base import LocalStore

FOLDER = keys.checkpoint_dir(7, 0, "00001-0123abcd")
KEY = f"{FOLDER}weights.safetensors"
SIZES = (10, 3, 8)
DATA = bytes(range(21))


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (object_digest, pieces):
        monkeypatch.setattr(module, "PART_BYTES", 4)


def stored(**values: object) -> StoredObject:
    return StoredObject(**{"key": KEY, "size_bytes": 21, "pieces": SIZES, **values})  # type: ignore


def test_the_first_piece_has_the_key_of_the_object_and_all_have_its_kind() -> None:
    assert keys_of(stored(pieces=None)) == [KEY]
    found = keys_of(stored())
    assert found == [
        KEY,
        f"{FOLDER}weights.00001.safetensors",
        f"{FOLDER}weights.00002.safetensors",
    ]
    assert {keys.kind_of(key) for key in found} == {Kind.CHECKPOINT}
    assert piece_key("folder.1/object", 2) == "folder.1/object.00002"


def test_a_part_ends_with_its_piece() -> None:
    first, second, third = keys_of(stored())
    parts = list(parts_of(stored()))
    assert len(parts) == part_count(stored()) == 6
    assert parts == [
        Part(first, 0, 4, 0),
        Part(first, 4, 4, 4),
        Part(first, 8, 2, 8),
        Part(second, 0, 3, 10),
        Part(third, 0, 4, 13),
        Part(third, 4, 4, 17),
    ]


def test_a_range_is_read_from_the_pieces_that_have_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first, second, third = keys_of(stored())
    for key, data in ((first, DATA[:10]), (second, DATA[10:13]), (third, DATA[13:])):
        store.put(key, data)
    for start in range(22):
        for length in range(1, 24):
            assert read_range(store, stored(), start, length) == DATA[start : start + length]


@pytest.mark.parametrize("block", [1, 5, 21])
def test_checksums_are_those_of_the_pieces(block: int) -> None:
    whole = ObjectDigest(pieces=SIZES)
    for start in range(0, 21, block):
        whole.update(DATA[start : start + block])
    expected = [checksum_of(DATA[part.at : part.stop]) for part in parts_of(stored())]
    assert whole.checksums == "".join(expected)
    alone = ObjectDigest()
    alone.update(DATA)
    assert alone.checksums == "".join(checksum_of(DATA[at : at + 4]) for at in range(0, 21, 4))


@pytest.mark.parametrize("wrong", [(), (21,), (10, 3, 7), (10, 0, 11), (10, -3, 14)])
def test_pieces_that_are_not_the_object_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(BadRecord, match=r"expected 2 to 99,999 pieces of 21 bytes in total"):
        stored(pieces=wrong)


def test_a_manifest_has_the_pieces_and_omits_them_for_one_process() -> None:
    manifest = CheckpointManifest(
        round=7,
        writer=Identity(replica=0, incarnation="00001-0123abcd"),
        model_hash="",
        base_rounds=(7,),
        tensors=(),
        weights_digest="",
        weights=stored(),
        outer=stored(pieces=None),
        tokens_total=0,
        wall_s=0.0,
    )
    data = manifest.to_bytes()
    assert CheckpointManifest.from_bytes(data) == manifest
    assert data.count(b'"pieces"') == 1
